"""Read what identifies a request: its key, its caller, its content. Pure."""
