"""Name the run of a scheduled job by its planned time, so that several schedulers run it once."""
