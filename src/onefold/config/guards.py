"""Build the guards of a configuration, exactly as it was linted.

A store is opened on first use, once for all guards that share it, and closed with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack
from importlib import import_module
from typing import Any, Generic, Self, TypeVar

from onefold import AsyncGuard, Guard, HandMadeTable, Policy, UsageError
from onefold._checks import did_you_mean
from onefold.codecs import Codec
from onefold.config.as_declared import AsyncGuardAsDeclared, GuardAsDeclared
from onefold.config.declared import Configuration, DeclaredGuard, DeclaredStore
from onefold.config.tree import Unusable, location, unusable
from onefold.events import Listener
from onefold.queues import keys

G = TypeVar("G", bound=Guard | AsyncGuard)

Listeners = Listener | Iterable[Listener]


class Loaded(Generic[G]):
    """The guards of a file by name. Each is created on first access, and then kept."""

    # The class of the guards, and that of the hidden guards that own the stores.
    _kind: Any
    _owner: Any

    def __init__(self, configuration: Configuration, *, on_event: Listeners = (), codec: Codec | None = None) -> None:
        self.configuration = configuration
        self._options: dict[str, Any] = {"on_event": on_event, "codec": codec}
        self._guards: dict[str, G] = {}
        # Guards that own a store, and lend it to the others.
        self._owners: dict[str, G] = {}
        self._making = threading.RLock()
        self._closed = False

    def __getitem__(self, name: str) -> G:
        declared = self._declared(name)
        with self._making:
            if self._closed:
                raise UsageError(f"the guards of {self.configuration.file} are closed")
            if name not in self._guards:
                self._guards[name] = self._made(declared)
            return self._guards[name]

    def key(self, name: str) -> Any:
        """Return the declared key of this guard, for `key=` of a queue adapter or (an argument's name) a decorator."""
        declared = self._declared(name)
        source, _, inside = (declared.key or "").partition(":")
        match source:
            case "header":
                return keys.header(inside)
            case "field":
                return keys.field(inside)
            case "message_id":
                return keys.message_id()
            case "argument":
                return inside
        says = f"the key is {source}, which the lint refuses" if source else "no key is declared"
        raise _wrong(f"{says}: declare header:NAME, field:PATH, argument:NAME or message_id", "key", declared, self)

    def __iter__(self) -> Iterator[str]:
        return iter(self.configuration.guards)

    def __len__(self) -> int:
        return len(self.configuration.guards)

    def __contains__(self, name: object) -> bool:
        return name in self.configuration.guards

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.configuration.file!r}: {', '.join(self)})"

    def _declared(self, name: str) -> DeclaredGuard:
        known = self.configuration.guards
        if name not in known:
            near = did_you_mean(name, known) or f": it has {', '.join(known) or 'none'}"
            raise UsageError(f"{self.configuration.file} declares no guard {name!r}{near}")
        return known[name]

    def _made(self, declared: DeclaredGuard) -> G:
        made = self._kind(
            self._lent(declared.store),
            migrate_from=self._old(declared),
            policy=_policy(declared, self),
            scope=declared.scope,
            **self._options,
        )
        made.declared = declared
        made.origin = location(self.configuration.file, self.configuration.mark("guards", declared.name))
        return made  # type: ignore[no-any-return]

    def _old(self, declared: DeclaredGuard) -> Any:
        """Return where the records of this guard were before, if the file says so."""
        table = declared.migrate_table
        if table is None:
            return None if declared.migrate_from is None else self._lent(declared.migrate_from)
        return HandMadeTable(
            str(table.store.url),
            table.table,
            key=table.key,
            operation=table.operation,
            operation_column=table.operation_column,
            scope_column=table.scope_column,
            result_column=table.result_column,
            at=table.at,
            keep=table.keep,
        )

    def _lent(self, store: DeclaredStore) -> Callable[[], Any]:
        """Return a function that gives the store of the guard that owns it; it is opened on first use."""
        with self._making:
            if store.name not in self._owners:
                # Our own string type hides its value; the drivers need it plain.
                self._owners[store.name] = self._owner(str(store.url))
            owner = self._owners[store.name]
        return lambda: owner.store

    def _all(self) -> list[G]:
        """Return all guards, to be closed in reverse: owners of stores come first. No more are created from now on."""
        with self._making:
            self._closed = True
            return [*self._owners.values(), *self._guards.values()]


class Guards(Loaded[Guard]):
    """The guards of a file, by name: `load("onefold.yaml")["payouts"]`. Closing it closes its stores."""

    _kind = GuardAsDeclared
    _owner = Guard

    def close(self) -> None:
        """Close the guards, and then their stores, even if one of them raises."""
        with ExitStack() as closing:
            for guard in self._all():
                closing.callback(guard.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncGuards(Loaded[AsyncGuard]):
    """The async `Guards`: `load_async("onefold.yaml")["payouts"]`."""

    _kind = AsyncGuardAsDeclared
    _owner = AsyncGuard

    async def aclose(self) -> None:
        """Close the guards, and then their stores, even if one of them raises."""
        async with AsyncExitStack() as closing:
            for guard in self._all():
                closing.push_async_callback(guard.aclose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _policy(declared: DeclaredGuard, loaded: Loaded[Any]) -> Policy:
    """Return the policy with the objects that the file names in Python, imported now."""
    changes: dict[str, Any] = {}
    if declared.probe is not None:
        changes["after_crash"] = _imported(declared.probe, "after_crash", declared, loaded)
    if declared.final_errors:
        changes["final_errors"] = [_imported(name, "final_errors", declared, loaded) for name in declared.final_errors]
    try:
        return declared.policy.replace(**changes) if changes else declared.policy
    except UsageError as error:
        raise _wrong(str(error), "", declared, loaded) from None


def _imported(name: str, field: str, declared: DeclaredGuard, loaded: Loaded[Any]) -> Any:
    module, _, inside = name.partition(":")
    try:
        found = import_module(module)
        for part in inside.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _wrong(f"{name!r} cannot be imported: {error}", field, declared, loaded) from error
    if not callable(found):
        raise _wrong(f"{name!r} is not a function", field, declared, loaded)
    return found


def _wrong(says: str, field: str, declared: DeclaredGuard, loaded: Loaded[Any]) -> Unusable:
    path = ("guards", declared.name, *([field] if field else []))
    return unusable(loaded.configuration.file, f"{'.'.join(path)}: {says}", loaded.configuration.mark(*path))
