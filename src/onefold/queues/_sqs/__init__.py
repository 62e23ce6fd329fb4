"""The rules of an SQS consumer, its requests, and its two drivers: threads and tasks. Private."""
