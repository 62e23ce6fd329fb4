"""Capture, check and build answers. Pure."""
