"""Django on ASGI, for the shutdown of its server: its views wait for a file. `ENDING_GRACE` says for how long."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpResponse
from django.urls import path

from onefold import Guard, Policy
from onefold.http import django as onefold_django
from onefold.http._asgi import background_requests
from onefold.http._django import asgi as _django_asgi

FOLDER = Path(os.environ["ENDING_FOLDER"])

background_requests.GRACE = float(os.environ["ENDING_GRACE"])  # type: ignore[misc]
_django_asgi.LOOKS_SECONDS = 0.05  # type: ignore[misc]

idempotency = onefold_django.middleware(
    guard=Guard(os.environ["ENDING_STORE"], policy=Policy(after_crash="hold")),
    scope=onefold_django.single_tenant,
    rules=os.environ["ENDING_RULES"],
)


def blocking(get_response: Any) -> Any:
    """A middleware of old: what is above it blocks, too."""
    return get_response


async def pay(_request: Any) -> HttpResponse:
    (FOLDER / "started").touch()
    try:
        while not (FOLDER / "gate").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        (FOLDER / "cancelled").touch()
        raise
    return HttpResponse("paid")


async def pay_careless(request: Any) -> HttpResponse:
    try:
        return await pay(request)
    except asyncio.CancelledError:
        # As a clean-up that fails does.
        raise ValueError from None


def pay_blocking(_request: Any) -> HttpResponse:
    (FOLDER / "started").touch()
    while not (FOLDER / "gate").exists():
        time.sleep(0.01)
    return HttpResponse("paid")


urlpatterns = [path("async", pay), path("careless", pay_careless), path("blocking", pay_blocking)]

below = ["tests.http_service.ending_django.blocking"] if os.environ["ENDING_BELOW"] else []
settings.configure(
    ALLOWED_HOSTS=["*"],
    DATABASES={},
    LOGGING_CONFIG=None,
    MIDDLEWARE=["tests.http_service.ending_django.idempotency", *below],
    ROOT_URLCONF="tests.http_service.ending_django",
    SECRET_KEY="for tests",
)
app = get_asgi_application()
