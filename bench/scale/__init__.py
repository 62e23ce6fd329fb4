"""`make bench-scale`: what a delivery costs as a store grows, what waiting duplicates cost, and a purge beside load."""
