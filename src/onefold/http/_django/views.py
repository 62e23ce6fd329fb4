"""Call Django's views, and refuse those that cannot be guarded before they run."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.views import View

from onefold import UsageError


class AsyncView(UsageError):
    """The view is async, and is not awaited here: awaited later, by Django, it would run outside its claim."""

    def __init__(self, view: Any) -> None:
        name = getattr(view, "__qualname__", None) or type(view).__name__
        super().__init__(f"{name} is async, and is not awaited inside its claim. Nothing ran. Use the middleware")


def check_view(view: Any) -> None:
    """Refuse a view that cannot be decorated."""
    if isinstance(view, type):
        raise UsageError(
            f"{view.__qualname__} is a class: decorate what it dispatches to, with "
            "@method_decorator(idempotent(guard=..., scope=...), name='dispatch')"
        )
    # `method_decorator` passes a method of the view in a partial; `dispatch` does not show that it is async.
    owner = getattr(getattr(view, "func", view), "__self__", None)
    if iscoroutinefunction(view) or getattr(type(owner), "view_is_async", False) is True:
        raise AsyncView(view)


def check_mixed(mixin: type[Any], view: type[Any]) -> None:
    """Refuse a view that would never call the mixin's `initial`, and so run unguarded."""
    if not issubclass(view, View):
        # The user's own mixin, not a view yet.
        return
    index = view.__mro__.index(mixin)
    before, after = view.__mro__[1:index], view.__mro__[index + 1 :]
    if any(map(_is_of_rest_framework, after)):
        return
    rest = next(filter(_is_of_rest_framework, before), None)
    if rest is None:
        raise UsageError(
            f"{view.__qualname__} is not a view of Django REST framework, and would run unguarded with "
            f"{mixin.__name__}. Decorate it: @method_decorator(idempotent(guard=..., scope=...), name='dispatch')"
        )
    raise UsageError(
        f"{view.__qualname__} would run unguarded: {rest.__name__} does not call the classes after it. Name the mixin "
        f"first: class {view.__name__}({mixin.__name__}, {rest.__name__})"
    )


def _is_of_rest_framework(view: type[Any]) -> bool:
    """Return whether it is an `APIView`. An `initial` alone means nothing: that of Django's form views is a dictionary.

    If the framework is not imported, nothing derives from it.
    """
    views = sys.modules.get("rest_framework.views")
    return views is not None and issubclass(view, views.APIView)


def responding(view: Callable[..., Any], request: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
    """Return a function that makes a decorated view's response; below `@api_view`, as the framework would finish it."""
    if not hasattr(request, "_request"):
        return functools.partial(called, view, request, args, kwargs)
    rest = (getattr(request, "parser_context", None) or {}).get("view")
    if rest is None:
        raise UsageError(
            "this request of Django REST framework does not name its view, so its response cannot be rendered. "
            "Nothing ran. Put @idempotent right below @api_view, or above it"
        )
    return functools.partial(finalized, rest, view, request, args, kwargs)


def finalized(view: Any, handler: Callable[..., Any], request: Any, args: Any, kwargs: Any) -> Any:
    """Return the response of a Django REST framework handler, rendered as its view would."""
    try:
        response = called(handler, request, args, kwargs)
    except AsyncView:
        raise
    except Exception as error:  # noqa: BLE001 - the framework makes a response of it, or raises it again
        response = view.handle_exception(error)
    return view.finalize_response(request, response, *args, **kwargs)


def called(view: Callable[..., Any], request: Any, args: Any, kwargs: Any) -> Any:
    """Call the view. If it turns out to be async, raise `AsyncView` before anything has run."""
    response = view(request, *args, **kwargs)
    if not inspect.isawaitable(response):
        return response
    # A coroutine has not begun, and never will; neither will a task created just now.
    for name in ("close", "cancel"):
        getattr(response, name, lambda: None)()
    raise AsyncView(view)
