"""One migration for each version of the tables."""
