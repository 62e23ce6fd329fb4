"""Capture, check and build responses. Pure."""
