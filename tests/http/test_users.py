"""`by_user`: a user without an id is nobody in particular, and never a caller whom strangers share."""

# Flask-Login and Django have no types.
# mypy: disable-error-code="misc"

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import flask
import flask_login
import pytest

from onefold import Guard, UsageError
from onefold.http import asgi, scopes, wsgi
from onefold.http._shared.messages import Refused, Request
from onefold.http.flask import by_user, idempotent
from tests.stores.django.project import project

# No id yet; and what a text of that looks like.
NOBODY = (None, "", " ", "None")


@pytest.fixture
def django_is_configured() -> Iterator[None]:
    with project():
        yield


def asked(by: Callable[[Request], Any], native: Any) -> Any:
    return by(Request("POST", "/pay", b"", [], native))


class Client:
    """A user without a row in a database, as those of API keys and service tokens are."""

    is_authenticated = True

    def __init__(self, pk: Any) -> None:
        self.pk = pk
        self.user = self


@pytest.mark.parametrize("identity", NOBODY)
def test_a_caller_without_a_name_is_refused(identity: Any) -> None:
    with pytest.raises(Refused, match="no id") as refused:
        scopes.name_of(identity, "by_user", "")

    assert refused.value.code == "caller_unknown"


@pytest.mark.parametrize(("identity", "name"), [("asha", "asha"), (0, "0"), (uuid.UUID(int=7), str(uuid.UUID(int=7)))])
def test_the_name_of_a_caller_is_its_text(identity: Any, name: str) -> None:
    assert scopes.name_of(identity, "by_user", "") == name


@pytest.mark.parametrize("identity", NOBODY)
@pytest.mark.usefixtures("django_is_configured")
def test_a_user_of_django_without_a_primary_key_is_refused(identity: Any) -> None:
    from onefold.http import django

    with pytest.raises(Refused) as refused:
        asked(django.by_user, Client(identity))

    assert refused.value.code == "caller_unknown"


@pytest.mark.usefixtures("django_is_configured")
def test_a_user_of_django_that_is_not_saved_is_refused() -> None:
    from django.db import models

    from onefold.http import django

    class Member(models.Model):
        is_authenticated = True

        class Meta:
            app_label = "members_of_the_tests"

        @property
        def user(self) -> Any:
            return self

    with pytest.raises(Refused) as refused:
        asked(django.by_user, Member())

    assert refused.value.code == "caller_unknown"
    assert asked(django.by_user, Member(pk=7)) == "7"


@pytest.mark.usefixtures("django_is_configured")
def test_a_primary_key_is_named_as_a_session_of_django_names_it() -> None:
    """Whatever its type is: a field writes its value as a text."""
    from django.db import models

    from onefold.http import django

    class Box:
        def __str__(self) -> str:
            return "box-7"

    class BoxField(models.Field):
        def value_to_string(self, obj: Any) -> str:
            return str(self.value_from_object(obj))

    class Boxed(models.Model):
        id = BoxField(primary_key=True)
        is_authenticated = True

        class Meta:
            app_label = "boxes_of_the_tests"

        @property
        def user(self) -> Any:
            return self

    assert asked(django.by_user, Boxed(pk=Box())) == "box-7"
    with pytest.raises(UsageError, match="has to be a str, an int or a UUID"):
        asked(django.by_user, Client(Box()))


def by_id(_name: str) -> Any:
    user = flask_login.UserMixin()
    # Its `get_id` writes "None".
    user.id = None
    return user


def by_get_id(name: str) -> Any:
    user = by_id(name)
    user.get_id = lambda: None
    return user


@pytest.mark.parametrize("made", [by_id, by_get_id])
def test_a_user_of_flask_login_without_an_id_is_refused_and_nothing_runs(made: Callable[[str], Any]) -> None:
    app, paid = flask.Flask("shop"), []
    manager = flask_login.LoginManager(app)
    manager.request_loader(lambda request: made(request.headers["X-Api-Key"]))

    @app.post("/pay")
    @idempotent(guard=Guard("memory:"), scope=by_user)
    def pay() -> str:
        paid.append("paid")
        return "paid"

    headers = [{"X-Api-Key": name, "Idempotency-Key": "key"} for name in ("asha", "riya")]
    answers = [app.test_client().post("/pay", headers=one) for one in headers]

    assert [(one.status_code, one.json["code"]) for one in answers if one.json] == [(400, "caller_unknown")] * 2
    assert paid == []


@pytest.mark.parametrize("identity", NOBODY)
def test_a_user_whom_a_server_does_not_name_is_refused(identity: Any) -> None:
    with pytest.raises(Refused) as refused:
        asked(wsgi.by_user, {"REMOTE_USER": identity})

    assert refused.value.code == "caller_unknown"


def test_a_user_of_asgi_whose_identity_is_a_text_of_nothing_is_refused() -> None:
    user = Client(None)
    user.identity = "None"  # type: ignore[attr-defined]

    with pytest.raises(Refused) as refused:
        asked(asgi.by_user, {"user": user})

    assert refused.value.code == "caller_unknown"
