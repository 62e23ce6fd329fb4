"""Adapt Django's views and its ASGI handler."""
