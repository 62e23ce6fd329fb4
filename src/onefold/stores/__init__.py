"""Stores keep records. They compare and swap; they decide nothing."""
