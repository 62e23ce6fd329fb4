"""The service as a Django application, below the middleware."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import django
from django.conf import settings

from onefold import Guard
from onefold.http.django import middleware
from tests.http_service.behaviour import CONFIG, RULES, Boom, behave, options_of, raises_below

if not settings.configured:
    settings.configure(
        ROOT_URLCONF="tests.http_service.django_app",
        MIDDLEWARE=[
            "django.middleware.common.CommonMiddleware",
            "tests.http_service.django_app.chosen",
            "tests.http_service.django_app.broken",
        ],
        ALLOWED_HOSTS=["*"],
        SECRET_KEY="for tests only",
        DATA_UPLOAD_MAX_MEMORY_SIZE=None,
        LOGGING_CONFIG=None,
    )
    django.setup()

from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import re_path


def view(request: Any) -> Any:
    answer = behave(request.path, request.META["QUERY_STRING"], request.body)
    response: Any = StreamingHttpResponse(answer.parts) if answer.streamed else HttpResponse(answer.whole)
    if request.method == "HEAD":
        # Not every server leaves it out by itself.
        response.content = b""
    response.status_code = answer.status
    for name, value in answer.headers:
        if name == "Set-Cookie":
            response.set_cookie(*value.split("="))
        else:
            response[name] = value
    return response


def chosen(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    guarded = {
        prefix: middleware(guard=Guard(CONFIG["store"], policy=rule.policy), **options_of(prefix))(get_response)
        for prefix, rule in RULES.items()
    }

    def handle(request: Any) -> Any:
        return guarded.get(request.path.split("/")[1], guarded["below"])(request)

    return handle


def broken(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def handle(request: Any) -> Any:
        response = get_response(request)
        if raises_below(request.META["QUERY_STRING"]):
            raise Boom("below the middleware")
        return response

    return handle


urlpatterns = [re_path(r"^.*$", view)]
app = get_wsgi_application()
