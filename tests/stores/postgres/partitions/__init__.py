"""Purging by dropping partitions."""
