"""Read `onefold.yaml`, check it, and build guards from it. See `docs/retention.md`."""

from onefold.config.configuration import Configuration, Problem, Unusable, read
from onefold.config.guards import AsyncGuards, Guards
from onefold.config.shape import schema

__all__ = ["AsyncGuards", "Configuration", "Guards", "Problem", "Unusable", "read", "schema"]
