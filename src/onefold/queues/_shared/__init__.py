"""Share what all queue adapters do: consume, decide, batch, check their options, and log."""
