"""Check every declared guard against every rule, and the guards against each other. Pure.

Codes are stable: a removed one is not used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from onefold import UsageError
from onefold.config.declared import Configuration, DeclaredGuard, DeclaredStore
from onefold.config.tree import Mark, location
from onefold.lint import rules as _rules
from onefold.lint.rules import Said, floor
from onefold.lint.store_identity import identity_of
from onefold.stores.identity import Identity
from onefold.stores.kinds import kind_of

__all__ = ["RULES", "Finding", "Rule", "findings", "floor"]


class Finding(NamedTuple):
    """A guard that will fail in production, and what to write instead."""

    code: str
    file: str
    mark: Mark
    guard: str
    # The problem and its reason, with the numbers.
    says: str
    fix: str

    def __str__(self) -> str:
        return f"{location(self.file, self.mark)}: {self.code} {self.message}"

    @property
    def message(self) -> str:
        return f"guards.{self.guard}: {self.says}. {self.fix}"


class Rule(NamedTuple):
    code: str
    title: str
    why: str
    # None: the rule looks at all guards together.
    judge: Callable[[DeclaredGuard], Iterator[Said]] | None = None
    # Only with `strict`.
    strict: bool = False


def findings(*configurations: Configuration, strict: bool = False) -> list[Finding]:
    """Return all violations, file by file and in the order of each. `strict` adds the rules that ask for more."""
    _check_settled(configurations)
    shared = list(_shared_operations(configurations))
    found: list[Finding] = []
    for configuration in configurations:
        here = [
            _placed(configuration, guard, rule.code, one)
            for guard in configuration.guards.values()
            for rule in RULES
            if rule.judge is not None and (strict or not rule.strict)
            for one in rule.judge(guard)
        ]
        here += [_placed(where, guard, "OF008", one) for where, guard, one in shared if where is configuration]
        found += sorted(here, key=lambda one: (one.mark.line, one.mark.column or 0, one.code))
    return found


def _check_settled(configurations: Sequence[Configuration]) -> None:
    """Refuse a guard whose settings nobody has read: its floor would be too low."""
    for configuration in configurations:
        for guard in configuration.guards.values():
            if guard.settings:
                raise UsageError(
                    f"guards.{guard.name} of {configuration.file} has settings that were not read: lint "
                    "read_settings(declared).configuration, from onefold.lint.settings"
                )


def _placed(configuration: Configuration, guard: DeclaredGuard, code: str, found: Said) -> Finding:
    mark = configuration.mark("guards", guard.name, found.field)
    return Finding(code, configuration.file, mark, guard.name, found.says, found.fix)


def _shared_operations(configurations: Sequence[Configuration]) -> Iterator[tuple[Configuration, DeclaredGuard, Said]]:
    """Yield guards that would write the same records: an operation of one name, in one store and scope."""
    seen: dict[tuple[str | None, str], list[tuple[Identity, Configuration, DeclaredGuard]]] = {}
    for configuration in configurations:
        for guard in configuration.guards.values():
            here = _identity(configuration, guard.store)
            for operation in dict.fromkeys(guard.operations):
                known = seen.setdefault((guard.scope, operation), [])
                first = next((one for one in known if one[0].may_be(here)), None)
                known.append((here, configuration, guard))
                if first is not None:
                    yield configuration, guard, _shared(operation, guard, configuration, *first[1:])


def _shared(
    operation: str, guard: DeclaredGuard, configuration: Configuration, where: Configuration, other: DeclaredGuard
) -> Said:
    mark = where.mark("guards", other.name)
    line = f"line {mark.line}" if where is configuration else location(where.file, mark)
    return Said(
        "operations" if len(guard.operations) > 1 else "operation",
        f"the operation {operation!r} is that of guards.{other.name} too ({line}), in the same store: of two consumers "
        "of one message, the second finds it done and never runs",
        "Give each guard an operation of its own",
    )


def _identity(configuration: Configuration, store: DeclaredStore) -> Identity:
    """Return the identity of a store: entries whose URLs name one location are one store; in memory each is its own.

    A variable in another file may have another value in production.
    """
    if kind_of(store.kind).in_process:
        return Identity(store.kind, name=f"{configuration.file} {store.name}")
    written = configuration.written_url(store.name)
    named = Identity("not known", name=written) if store.url is None else identity_of(str(store.url))
    return named._replace(kind=f"{configuration.file} {named.kind}") if "$" in written else named


RULES: Final = (
    Rule(
        "OF001",
        "keep is below the floor",
        "a duplicate that comes after keep runs again: the floor is twice the largest of the sum of the duplicates, "
        "the visibility timeout and the longest replay",
        _rules.keep_below_floor,
    ),
    Rule(
        "OF002",
        "the lease is not shorter than keep",
        "a finished record would be forgotten before a crashed one is given up",
        _rules.lease_not_shorter_than_keep,
    ),
    Rule(
        "OF003",
        "the visibility timeout is shorter than the handler's time",
        "the queue redelivers messages that are still running",
        _rules.delivered_again_too_soon,
    ),
    Rule(
        "OF004",
        "money on a store that evicts",
        "a full server forgets payments that are done. A Redis counts as one until evicts: false is declared",
        _rules.money_on_what_evicts,
    ),
    Rule(
        "OF005",
        "money in a mode with a crash window",
        "seen, and claim under rerun without a provider that knows the key, run again after a crash; skip may lose a "
        "payment",
        _rules.money_with_a_crash_window,
    ),
    Rule(
        "OF006",
        "a rerun can outlive the provider's memory",
        "the provider treats the same key as a new one, and the effect happens twice",
        _rules.rerun_past_the_provider,
    ),
    Rule(
        "OF007",
        "the key is an offset, a job id, a content hash, a count of attempts or the id of a try",
        "a retry of the producer has another position, another count and another request or trace id, and two equal "
        "orders have one hash",
        _rules.key_of_the_receiver,
    ),
    Rule(
        "OF008",
        "two guards share an operation",
        "they write the same records, and the second consumer of a message never runs",
    ),
    Rule(
        "OF009",
        "money in an in-memory store",
        "a restart forgets it, and a second worker never sees it",
        _rules.money_in_memory,
    ),
    Rule(
        "OF010",
        "transactional on a store without transactions",
        "the record and the work cannot commit together",
        _rules.transactions_that_are_not_there,
    ),
    Rule(
        "OF011",
        "money that runs while its store is down",
        "every duplicate runs while it is down",
        _rules.money_unprotected,
    ),
    Rule(
        "OF012",
        "money that is kept by default",
        "neither keep nor the sources of duplicates are declared: a duplicate that comes after the default pays again",
        _rules.money_by_default,
    ),
    Rule(
        "OF013",
        "money with a final error that leaves the outcome unknown",
        "after a timeout, a lost connection or any exception at all, nobody knows whether the payment happened, and "
        "every retry gets the remembered failure",
        _rules.money_that_remembers_doubt,
    ),
    Rule(
        "OF014",
        "a probe that cannot know the outcome",
        "a function of the standard library or of Onefold cannot know what happened to the effect",
        _rules.probe_that_knows_nothing,
    ),
    Rule(
        "OF015",
        "attempts without an end",
        "a message that kills its workers keeps killing them, and nobody is alerted",
        _rules.attempts_without_an_end,
    ),
    Rule(
        "OF016",
        "SQLite in memory",
        "no other connection could see its records: the store refuses to open it",
        _rules.sqlite_in_memory,
    ),
    Rule(
        "OF017",
        "money that counts an unknown outcome as a failure",
        "ambiguous_errors replaces the usual errors: without TimeoutError and ConnectionError a payment that timed "
        "out counts as one that did not happen, and every retry pays again",
        _rules.money_that_takes_doubt_for_no,
    ),
    Rule(
        "OF018",
        "money without a declared key",
        "nothing says who mints the key, and any id of the receiver's pays again on every retry",
        _rules.money_without_a_key,
    ),
    Rule(
        "OF019",
        "no documented floor (--strict)",
        "neither duplicates nor replays is declared, so nobody can tell whether keep is long enough",
        _rules.no_documented_floor,
        strict=True,
    ),
    Rule(
        "OF020",
        "a number that differs from the settings",
        "it was typed again by hand, and the queue has another one by now: what is in the settings counts",
        _rules.number_that_drifted,
    ),
)
