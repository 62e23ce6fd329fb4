"""Share the rules of Kafka between its clients: partitions, offsets, and messages."""
