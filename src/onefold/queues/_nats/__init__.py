"""The rules of a JetStream consumer, and its messages with nats-py. Private."""
