"""Share what commands need: output, progress, and how they find stores and records."""
