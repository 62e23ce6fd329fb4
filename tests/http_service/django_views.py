"""Views of Django, and of Django REST framework, each guarded by itself; on WSGI and on ASGI."""

# Neither of them has types.
# mypy: disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import django
from django.conf import settings

from onefold import Guard, Policy, current
from onefold.http.django import Idempotency, IdempotentMixin, by_header, by_user, idempotent, middleware, single_tenant
from tests.http_service.behaviour import CONFIG, note

if not settings.configured:
    settings.configure(
        ROOT_URLCONF="tests.http_service.django_views",
        MIDDLEWARE=[
            "django.middleware.common.CommonMiddleware",
            "tests.http_service.django_views.authentication",
            "tests.http_service.django_views.guarding",
        ],
        INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rest_framework"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": Path(CONFIG["effects"]).parent / "shop.db",
                "ATOMIC_REQUESTS": True,
            }
        },
        ALLOWED_HOSTS=["localhost", "127.0.0.1", ".example"],
        SECRET_KEY="for tests only",
        LOGGING_CONFIG=None,
        USE_TZ=True,
    )
    django.setup()

from django.contrib.auth.models import AnonymousUser, User
from django.core.asgi import get_asgi_application
from django.core.exceptions import PermissionDenied
from django.core.wsgi import get_wsgi_application
from django.db import connection, transaction
from django.http import FileResponse, Http404, HttpResponse, StreamingHttpResponse
from django.urls import path
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import NotAuthenticated
from rest_framework.permissions import IsAuthenticated
from rest_framework.response import Response
from rest_framework.serializers import IntegerField, Serializer
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

FOLDER = Path(CONFIG["effects"]).parent

guard = Guard(CONFIG["store"])
holding = Guard(CONFIG["store"], policy=Policy(after_crash="hold"))


def authentication(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def handle(request: Any) -> Any:
        name = request.headers.get("X-User", "")
        request.user = User(pk=int(name), username=name) if name else AnonymousUser()
        return get_response(request)

    def process_exception(request: Any, error: Exception) -> None:
        note(f"seen {request.GET['name']}-seen {type(error).__name__}")

    handle.process_exception = process_exception  # type: ignore[attr-defined]
    return handle


_guarding = middleware(guard=guard, scope=by_user, operation="middleware")


def guarding(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Only for what is below /middleware/: the other views guard themselves."""
    guarded = _guarding(get_response)

    def handle(request: Any) -> Any:
        return (guarded if request.path.startswith("/middleware/") else get_response)(request)

    return handle


def create_tables() -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS customer (id INTEGER PRIMARY KEY)")
        cursor.execute(
            "CREATE TABLE IF NOT EXISTS payment (key TEXT, customer INTEGER "
            "REFERENCES customer (id) DEFERRABLE INITIALLY DEFERRED)"
        )


create_tables()


def pay(request: Any) -> HttpResponse:
    """One row; with ?orphan=1 one that the commit refuses."""
    note(f"{request.path} {request.GET['name']} {len(request.body)}")
    with connection.cursor() as cursor:
        customer = 1 if "orphan" in request.GET else None
        cursor.execute("INSERT INTO payment VALUES (%s, %s)", [request.GET["name"], customer])
    return HttpResponse("paid", status=201)


def rows(request: Any) -> HttpResponse:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM payment WHERE key = %s", [request.GET["name"]])
        return HttpResponse(str(cursor.fetchone()[0]))


def own(view: Any) -> Any:
    """Outside of the transaction of a request, and guarded."""
    return transaction.non_atomic_requests(idempotent(guard=guard, scope=by_user)(view))


@idempotent(guard=guard, scope=by_user)
def in_a_transaction(request: Any) -> HttpResponse:
    return pay(request)


@own
def with_its_own_transaction(request: Any) -> HttpResponse:
    with transaction.atomic():
        response = pay(request)
        if request.GET.get("raise") == "404":
            raise Http404("no such order")
        if request.GET.get("raise") == "403":
            raise PermissionDenied
        return response


@own
def download(request: Any) -> Any:
    note(f"{request.path} {request.GET['name']} 0")
    (FOLDER / "receipt").write_bytes(b"a receipt")
    return FileResponse((FOLDER / "receipt").open("rb"), content_type="text/plain")


@transaction.non_atomic_requests
@idempotent(guard=guard, scope=single_tenant, body_max=1_000)
def stream(request: Any) -> Any:
    note(f"{request.path} {request.GET['name']} 0")
    count = int(request.GET["parts"])

    def parts() -> Iterator[bytes]:
        for number in range(count):
            note(f"part {request.GET['name']}-part {number}")
            yield b"p" * 100

    return StreamingHttpResponse(parts())


def events(request: Any) -> Any:
    """An async stream, on ASGI, below the middleware that blocks."""
    note(f"{request.path} {request.GET['name']} 0")

    async def parts() -> AsyncIterator[bytes]:
        for number in range(3):
            await asyncio.sleep(0)
            yield b"%d " % number

    return StreamingHttpResponse(parts())


@transaction.non_atomic_requests
async def async_view(request: Any) -> HttpResponse:
    await asyncio.sleep(0)
    note(f"{request.path} {request.GET['name']} 0")
    return HttpResponse(f"{current().key}", status=201)


class ByHeader(BaseAuthentication):
    def authenticate(self, request: Any) -> Any:
        name = request.headers.get("X-User", "")
        return (User(pk=int(name), username=name), None) if name else None

    def authenticate_header(self, _request: Any) -> str:
        return "X-User"


class Order(Serializer):
    amount = IntegerField()


class Payments(IdempotentMixin, APIView):
    idempotency = Idempotency(guard=holding, scope=by_user, operation="rest")
    authentication_classes: ClassVar = [ByHeader]
    permission_classes: ClassVar = [IsAuthenticated]

    def get(self, request: Any) -> Response:
        return self.post(request)

    def post(self, request: Any) -> Response:
        note(f"{request.path} {request.GET['name']} 0")
        if request.GET.get("raise") == "boom":
            raise RuntimeError("boom")
        if request.GET.get("raise") == "401":
            raise NotAuthenticated
        order = Order(data=request.data)
        order.is_valid(raise_exception=True)
        return Response({"key": current().key if request.method == "POST" else "", **order.data}, status=201)


class Refunds(IdempotentMixin, ViewSet):
    authentication_classes: ClassVar = [ByHeader]
    idempotency = Idempotency(guard=guard, scope=by_header("X-User"), operation="refunds")

    def create(self, request: Any) -> Response:
        note(f"{request.path} {request.GET['name']} 0")
        return Response({"refunded": request.data["amount"]}, status=201)


class Eager(Payments):
    """Reads its data before the handler, where the body is still needed."""

    def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
        assert request.data
        super().initial(request, *args, **kwargs)


urlpatterns = [
    path("middleware/pay", pay),
    path("middleware/events", events),
    path("middleware/awaited", async_view),
    path("in-a-transaction", in_a_transaction),
    path("with-its-own", with_its_own_transaction),
    path("download", download),
    path("stream", stream),
    path("rest/payments", transaction.non_atomic_requests(Payments.as_view())),
    path("rest/atomic", Payments.as_view()),
    path("rest/eager", transaction.non_atomic_requests(Eager.as_view())),
    path("rest/refunds", transaction.non_atomic_requests(Refunds.as_view({"post": "create"}))),
    path("rows", rows),
]
app = get_wsgi_application()
asgi = get_asgi_application()
