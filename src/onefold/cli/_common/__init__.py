"""The common part of the commands: output, progress, and how they find stores and records."""
