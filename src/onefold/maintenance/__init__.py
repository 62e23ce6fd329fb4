"""Keep a store in order: purge, copy, and import the tables of other systems."""
