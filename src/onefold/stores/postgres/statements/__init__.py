"""The larger statements of PostgreSQL, and the fragments that they share."""
