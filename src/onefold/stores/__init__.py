"""Stores remember records. They compare and swap; they decide nothing."""
