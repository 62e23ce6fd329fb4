"""Survive interrupts and forks, and write waiting code once for sync and async."""
