"""Tests of the report: what would have happened without Onefold."""
