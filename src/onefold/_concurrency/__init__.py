"""Survive interrupts and forks, and write what waits once for sync and async."""
