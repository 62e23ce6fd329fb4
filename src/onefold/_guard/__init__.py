"""Hold what both guards share: options, checks, the making of deliveries, and what their drivers work with."""
