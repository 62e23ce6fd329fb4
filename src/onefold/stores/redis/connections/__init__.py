"""Connections that a client does not know: one that tasks share for their calls, and those that renew claims."""
