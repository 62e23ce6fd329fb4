"""Turn a tree of plain values into declarations. Anything unknown, missing or wrong is a problem with a location.

It opens no store, reads no file and imports none of your code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from onefold import Policy, UsageError
from onefold._checks import did_you_mean
from onefold._entry_points import STORES, installed
from onefold.config import fields as _fields
from onefold.config.declared import Configuration, DeclaredGuard, DeclaredStore, DeclaredTable
from onefold.config.environment import NotSet, fill
from onefold.config.tree import Path, Problem, Tree
from onefold.config.wording import shown

SECTIONS: Final = ("stores", "guards")


class Elsewhere(Exception):
    """Stands for a probe, or an exception, that a file names: neither is imported for linting."""


class Reading:
    """Reads one file from its tree. Mistakes are collected, and reading continues."""

    def __init__(self, tree: Tree, environment: Mapping[str, str], *, to_run: bool) -> None:
        self.problems: list[Problem] = []
        self._tree = tree
        self._environment = environment
        self._to_run = to_run
        self._unset: list[str] = []
        self._unowned: list[str] = []

    def configuration(self) -> Configuration:
        root = self._table(self._tree.value or {}, (), SECTIONS)
        if not self._tree.value:
            self._problem((), "the file is empty: it has to declare stores and guards")
        elif isinstance(self._tree.value, Mapping):
            self._wants(root, (), SECTIONS)
        stores = {
            name: self._store(name, self._table(value, path, _fields.STORE), path)
            for name, value, path in self._entries(root, "stores")
        }
        guards = {
            name: self._guard(name, self._table(value, path, _fields.GUARD), path, stores)
            for name, value, path in self._entries(root, "guards")
        }
        return Configuration(
            file=self._tree.file,
            stores=stores,
            guards=guards,
            unset=tuple(self._unset),
            unowned=tuple(self._unowned),
            tree=self._tree,
        )

    def _entries(self, root: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any, Path]]:
        if section not in root:
            return
        found = root[section]
        if not isinstance(found, Mapping):
            self._problem((section,), f"{section}: expected a table of names, not {shown(found)}")
            return
        for name, value in found.items():
            path = (section, name)
            if not name.strip():
                self._problem(path, f"{section}: a name is empty")
            yield name, value, path

    def _table(self, value: Any, path: Path, known: Any) -> Mapping[str, Any]:
        """Return the table, without fields that it must not have."""
        if not isinstance(value, Mapping):
            fields = ", ".join(list(known)[:3])
            self._problem(path, f"{_dotted(path)}expected a table of fields ({fields}…), not {shown(value)}")
            return {}
        for name in value:
            if name not in known:
                self._problem((*path, name), f"{_dotted(path)}{shown(name)} is not a field{_nearest(name, known)}")
        return {name: part for name, part in value.items() if name in known}

    def _wants(self, table: Mapping[str, Any], path: Path, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in table:
                self._problem(path, f"{_dotted(path)}{name!r} is missing")

    def _meant(self, table: Mapping[str, Any], path: Path, meanings: Mapping[str, _fields.Meaning]) -> dict[str, Any]:
        """Return the converted fields, without those that are wrong."""
        found = {}
        for name, value in table.items():
            try:
                found[name] = meanings[name](self._filled(value))
            except NotSet as error:
                self._not_set(str(error), (*path, name))
            except ValueError as error:
                self._problem((*path, name), f"{_dotted((*path, name))}{error}")
        return found

    def _filled(self, value: Any) -> Any:
        """Substitute the variables in a value, or in its parts."""
        match value:
            case str():
                return fill(value, self._environment)
            case list():
                return [self._filled(part) if isinstance(part, str) else part for part in value]
            case dict():
                return {name: self._filled(part) if isinstance(part, str) else part for name, part in value.items()}
            case _:
                return value

    def _not_set(self, variable: str, path: Path) -> None:
        if not self._to_run and path[0] == "stores" and path[-1] == "url":
            self._unset.append(variable)
        elif path[0] == "guards" and path[-1] == "broker":
            # Only the doctor asks a broker, and says that it is not known.
            return
        else:
            self._problem(path, f"{_dotted(path)}the environment variable {variable} is not set")

    def _store(self, name: str, table: Mapping[str, Any], path: Path) -> DeclaredStore:
        self._wants(table, path, ("url",) if table else ())
        meant = self._meant(table, path, _fields.STORE)
        url: str | None = meant.get("url")
        written = table.get("url")
        kind = _kind(url if url is not None else written if isinstance(written, str) else "")
        if url is not None:
            self._check_kind(kind, url, (*path, "url"))
        return DeclaredStore(name=name, url=url, kind=kind, evicts=meant.get("evicts"))

    def _check_kind(self, kind: str, url: str, path: Path) -> None:
        """Check the kind of a store. No message shows the URL itself: it may contain a password.

        A kind that is unknown here may belong to a package that is installed in production, but not next to a lint. A
        kind that is only a letter or two away from a known one is a mistake anywhere.
        """
        known = sorted(installed(STORES))
        if kind in known:
            return
        near = did_you_mean(kind, known)
        if not kind:
            self._problem(path, f"{_dotted(path)}this is not a URL of a store, such as sqlite:///onefold.db")
        elif self._to_run or near:
            named = shown(kind) if not hasattr(url, "written") else "the variable's value"
            self._problem(path, f"{_dotted(path)}no store is known for {named}{near or ': ' + ', '.join(known)}")
        else:
            self._unowned.append(str(path[1]))

    def _guard(
        self, name: str, table: Mapping[str, Any], path: Path, stores: Mapping[str, DeclaredStore]
    ) -> DeclaredGuard:
        self._wants(table, path, ("store",) if table else ())
        meant = self._meant(table, path, _fields.GUARD)
        store = self._chosen("store", meant, path, stores)
        rows = meant.pop("migrate_from") if isinstance(meant.get("migrate_from"), Mapping) else None
        migrate_from = self._chosen("migrate_from", meant, path, stores) if "migrate_from" in meant else None
        if migrate_from is not None and migrate_from == store:
            where = (*path, "migrate_from")
            self._problem(where, f"{_dotted(where)}this is the store itself: name the one that has the records so far")
        if "operation" in meant and "operations" in meant:
            self._problem((*path, "operation"), f"{_dotted(path)}give operation or operations, not both")
        named = meant.pop("operations", ()) or tuple(filter(None, [meant.pop("operation", None)]))
        meant.pop("operation", None)
        migrate_table = None if rows is None else self._old_table(rows, (*path, "migrate_from"), store, stores, named)
        asked = {field: meant.pop(field) for field in _fields.POLICY if field in meant}
        mode, policy, probe = self._policy(asked, path)
        return DeclaredGuard(
            name=name,
            store=store,
            migrate_from=migrate_from,
            migrate_table=migrate_table,
            policy=policy,
            keep_said="keep" in asked,
            mode=mode,
            operations=named or (name,),
            any_operation=not named,
            probe=probe,
            final_errors=asked.get("final_errors", ()),
            **meant,
        )

    def _old_table(
        self,
        value: Mapping[str, Any],
        path: Path,
        store: DeclaredStore,
        stores: Mapping[str, DeclaredStore],
        operations: tuple[str, ...],
    ) -> DeclaredTable | None:
        """Return the hand-made table; `store` and `operations` are the guard's own. None: it cannot be used."""
        table = self._table(value, path, _fields.TABLE)
        self._wants(table, path, ("table", "key"))
        meant = self._meant(table, path, _fields.TABLE)
        home = self._chosen("store", meant, path, stores) if "store" in meant else store
        self._name_operation(meant, path, operations)
        if "table" not in meant or "key" not in meant:
            return None
        return DeclaredTable(store=home, **meant)

    def _name_operation(self, meant: dict[str, Any], path: Path, operations: tuple[str, ...]) -> None:
        """Check the operation of a table's rows; if none is named, it is the guard's only one."""
        named = meant.get("operation")
        if named is not None and "operation_column" in meant:
            self._problem((*path, "operation"), f"{_dotted(path)}give operation or operation_column, not both")
        elif named is not None and operations and named not in operations:
            says = f"the guard is not for the operation {shown(named)}{_nearest(named, operations)}"
            self._problem((*path, "operation"), f"{_dotted((*path, 'operation'))}{says}")
        elif named is None and "operation_column" not in meant and len(operations) == 1:
            meant["operation"] = operations[0]
        elif named is None and "operation_column" not in meant:
            self._problem(path, f"{_dotted(path)}name the operation of its rows, or operation_column if they differ")

    def _chosen(
        self, field: str, meant: dict[str, Any], path: Path, stores: Mapping[str, DeclaredStore]
    ) -> DeclaredStore:
        """Return the store that this field names."""
        chosen = meant.pop(field, "")
        if chosen and chosen not in stores:
            near = _nearest(chosen, stores)
            self._problem((*path, field), f"{_dotted((*path, field))}there is no store {shown(chosen)}{near}")
        return stores.get(chosen) or DeclaredStore(name=chosen, url=None, kind="")

    def _policy(self, asked: dict[str, Any], path: Path) -> tuple[str, Policy, str | None]:
        """Return the mode, the policy as far as possible without importing anything, and the name of the probe."""
        mode: str = asked.get("mode", "claim")
        probe: str | None = asked.get("after_crash") if ":" in asked.get("after_crash", "") else None
        usable = asked | ({"mode": "claim"} if mode == "transactional" else {})
        usable |= {"after_crash": Elsewhere} if probe else {}
        usable |= {"final_errors": tuple(Elsewhere for _ in asked["final_errors"])} if "final_errors" in asked else {}
        alone = [field for field in usable if not self._accepted({field: usable[field]}, (*path, field))]
        together = {field: value for field, value in usable.items() if field not in alone}
        return mode, self._accepted(together, path) or Policy(), probe

    def _accepted(self, fields: dict[str, Any], path: Path) -> Policy | None:
        # A field that limits another is checked together with it.
        if list(fields) == ["rerun_within"]:
            fields = {**fields, "after_crash": "rerun"}
        try:
            return Policy(**fields)
        except UsageError as error:
            self._problem(path, f"{_dotted(path[:2])}{error}")
            return None

    def _problem(self, path: Path, says: str) -> None:
        self.problems.append(Problem(self._tree.file, self._tree.mark(path), says))


def _kind(url: str) -> str:
    """Return the scheme of a URL, as far as it is known without its variables."""
    scheme, colon, _ = url.partition(":")
    return scheme.lower().partition("+")[0] if colon and "$" not in scheme else ""


def _dotted(path: Path) -> str:
    return f"{'.'.join(map(str, path))}: " if path else ""


def _nearest(name: object, known: Any) -> str:
    return did_you_mean(name, known) or f". Known: {', '.join(known) or 'none'}"
