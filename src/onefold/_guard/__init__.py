"""The common part of both guards: options, checks, the creation of deliveries, and the context of their drivers."""
