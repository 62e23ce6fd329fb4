"""The app config; Django knows the app as `onefold`."""

from __future__ import annotations

from django.apps import AppConfig


class OnefoldConfig(AppConfig):  # type: ignore[misc]
    name = "onefold.django"
    label = "onefold"
    verbose_name = "Onefold"
