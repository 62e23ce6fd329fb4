"""Keep live claims alive while their handlers run."""
