"""Purge by dropping partitions: `?partitions=day` seals the table once a day, and later drops it as a whole.

`dialect` has the operations, `layout` the tables, `turning` what seals a partition and what drops one.
"""
