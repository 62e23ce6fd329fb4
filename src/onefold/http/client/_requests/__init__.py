"""Keep one key across all retries of a call with requests."""
