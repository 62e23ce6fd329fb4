"""Look at a bounded part of a store of any size, for tools: a sample, what is unsettled, and the newest records."""
