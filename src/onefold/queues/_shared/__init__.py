"""The common part of all queue adapters: consuming, verdicts, batches, checks of options, and logs."""
