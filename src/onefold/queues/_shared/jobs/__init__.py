"""The common part of all job frameworks: the arguments of a call, the options of `guarded`, and one job in progress."""
