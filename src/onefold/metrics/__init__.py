"""Metrics: subscribers to events, for Prometheus (`metrics.prometheus`) and OpenTelemetry (`metrics.opentelemetry`).

`measured(store)` times the calls of a store. Nothing here may stop a delivery, and no key, scope or digest may become
a label.
"""

from __future__ import annotations

from onefold.metrics.timing import measured

__all__ = ["measured"]
