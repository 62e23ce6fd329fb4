"""Decide, claim, run and finish one delivery: pure flows, and the two drivers that perform them."""
