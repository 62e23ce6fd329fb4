"""Share the rules of the Idempotency-Key header between all frameworks."""
