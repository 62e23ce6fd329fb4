"""Perform the steps inside a handler: each runs once, and a retry continues after the last that finished."""
