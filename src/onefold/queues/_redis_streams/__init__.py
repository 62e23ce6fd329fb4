"""Redis Streams: rules, entries and the loop of a consumer, for sync and async clients."""
