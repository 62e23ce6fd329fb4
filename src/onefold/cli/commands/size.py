"""`onefold size`: records, bytes, round trips and connections for your own numbers, from measured costs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
import typer

from onefold.cli._common.durations import seconds_of
from onefold.cli._common.output import WRONG_USAGE, Format, FormatOption, Listing, Refusal, note, print_json
from onefold.cli._common.quantities import bytes_of, in_bytes, in_words, rate_of, share_of
from onefold.durations import as_text
from onefold.sizing import COSTS, Contradiction, Costs, Size, Workload, size
from onefold.sizing.costs import ALIASES
from onefold.stores.kinds import scheme_of

KEY_MAX: Final = 255
# The policy's `max_result_bytes`: a larger result is left out of the record.
RESULT_MAX: Final = 2**20

DAYS_A_YEAR: Final = 365


class Mode(StrEnum):
    CLAIM = "claim"
    TRANSACTIONAL = "transactional"


def size_command(
    rate: Annotated[str, typer.Option("--rate", help="Deliveries, duplicates among them: 2000/s, 10k/min, 1bn/day.")],
    keep: Annotated[str, typer.Option("--keep", help="How long records are kept: 24h, 30d, forever.")] = "24h",
    store: Annotated[
        list[str] | None,
        typer.Option("--store", show_default=False, help="postgres, redis... or a URL, which is not opened."),
    ] = None,
    duplicates: Annotated[str, typer.Option("--duplicates", help="The share of duplicates: 5% or 0.05.")] = "0%",
    handler: Annotated[str, typer.Option("--handler", help="How long a handler runs.")] = "50ms",
    result: Annotated[str, typer.Option("--result", help="The bytes of a result that is kept: 300, 1KiB.")] = "0",
    key: Annotated[int, typer.Option("--key", min=1, max=KEY_MAX, help="The characters of a key.")] = 36,
    mode: Annotated[Mode, typer.Option("--mode", help="How deliveries are guarded.")] = Mode.CLAIM,
    fingerprint: Annotated[
        bool, typer.Option("--fingerprint/--no-fingerprint", help="Whether payloads are compared.")
    ] = True,
    round_trip: Annotated[str, typer.Option("--round-trip", help="Network time to the server and back.")] = "0.5ms",
    peak: Annotated[float, typer.Option("--peak", help="The busiest moment, as a multiple of the rate: 4.")] = 1.0,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Estimate the disk or memory, connections and cores that a store needs, from measured costs.

    Without --store, all stores are compared. No store is opened. The numbers are about right: measure your own with
    onefold stats once there are records.
    """
    workload = Workload(
        rate=rate_of(rate, "--rate"),
        peak=_finite(peak, "--peak"),
        keep=seconds_of(keep, "--keep"),
        duplicates=share_of(duplicates, "--duplicates"),
        handler=_time(handler, "--handler"),
        round_trip=_time(round_trip, "--round-trip"),
        result=_result(result),
        key=key,
        fingerprint=fingerprint,
        mode=mode.value,
    )
    names = [*dict.fromkeys(map(_costs_name, store))] if store else [*_possible(workload)]
    try:
        sizes = {name: size(workload, COSTS[name]) for name in names}
    except Contradiction as error:
        raise Refusal(str(error), WRONG_USAGE) from None
    _print(format, workload, sizes)


def _time(text: str, option: str) -> float:
    return _finite(seconds_of(text, option), option)


def _finite(number: float, option: str) -> float:
    if not math.isfinite(number):
        raise Refusal(f"{option}: give it a finite number", WRONG_USAGE)
    return number


def _result(text: str) -> int:
    found = bytes_of(text, "--result")
    if found > RESULT_MAX:
        raise Refusal(
            f"--result {text}: a result above 1 MiB is not kept (max_result_bytes). Keep an id instead", WRONG_USAGE
        )
    return found


def _costs_name(store: str) -> str:
    name = scheme_of(store)
    name = ALIASES.get(name, name)
    if name in COSTS:
        return name
    near = difflib.get_close_matches(name, [*COSTS, *ALIASES], n=1)
    meant = f". Did you mean {ALIASES.get(near[0], near[0])}?" if near else ""
    raise Refusal(f"--store {name!r} has no measured costs: choose among {', '.join(COSTS)}{meant}", WRONG_USAGE)


def _possible(workload: Workload) -> Iterator[str]:
    """Yield the stores that can be compared: in transactional mode, those that have it."""
    for name, costs in COSTS.items():
        if workload.mode == "claim" or costs.transactional_saves is not None:
            yield name


def _print(format_: Format, workload: Workload, sizes: dict[str, Size]) -> None:
    if format_ is Format.JSON:
        print_json({"workload": _facts(workload), "stores": {name: _facts(found) for name, found in sizes.items()}})
        return
    if len(sizes) == 1:
        ((name, found),) = sizes.items()
        Listing(["what", "about", "because"]).add([*_lines(workload, COSTS[name], found)])
    else:
        columns = ["store", "records", "size", "provide", "a day", "round trips/s", "connections", "cores"]
        Listing(columns).add([_row(COSTS[name], found) for name, found in sizes.items()])
    for name, found in sizes.items():
        for warning in found.warnings:
            note(f"{name}: {warning}")


def _facts(struct: Workload | Size) -> dict[str, Any]:
    """Return the numbers for a program; null is forever, or not known."""
    facts: dict[str, Any] = msgspec.to_builtins(struct)
    return {name: None if value == math.inf else value for name, value in facts.items()}


def _row(costs: Costs, found: Size) -> list[str]:
    return [
        costs.name,
        _or_grows(found.records, in_words),
        _or_grows(found.bytes, in_bytes),
        _or_grows(found.provide, in_bytes),
        in_bytes(found.bytes_a_day),
        in_words(found.round_trips),
        "one a process" if found.connections is None else in_words(found.connections),
        "" if found.cores is None else in_words(found.cores),
    ]


def _or_grows(number: float | None, said: Any) -> str:
    return "unbounded" if number is None else str(said(number))


def _lines(workload: Workload, costs: Costs, found: Size) -> Iterator[list[str]]:
    """Yield each number with its reason."""
    where = "memory" if costs.in_memory else "disk"
    new = workload.rate * (1 - workload.duplicates)
    yield ["new keys", f"{in_words(found.records_a_day)} a day", f"{in_words(new)}/s"]
    yield ["a record", in_bytes(found.record_bytes), f"on {costs.name}, {_with(costs)}"]
    if found.records is not None and found.bytes is not None and found.provide is not None:
        yield ["records", in_words(found.records), f"{in_words(new)}/s kept for {as_text(workload.keep)}"]
        yield [f"{where}, records", in_bytes(found.bytes), ""]
        yield [f"{where}, to provide", in_bytes(found.provide), costs.why_headroom or "as it grows"]
    else:
        yield [f"{where}, a day", in_bytes(found.bytes_a_day), "kept forever: it only grows"]
        yield [f"{where}, a year", in_bytes(found.bytes_a_day * DAYS_A_YEAR), ""]
    if found.log_a_day is not None:
        low, high = map(in_bytes, found.log_a_day)
        yield ["log, a day", f"{low} to {high}", "less with fewer checkpoints"]
    yield ["purge", *_purge(costs, found)]
    yield from _work(workload, costs, found)


def _work(workload: Workload, costs: Costs, found: Size) -> Iterator[list[str]]:
    if workload.peak > 1:
        why = f"{workload.peak:g} times the rate; what follows is for this moment"
        yield ["peak", f"{in_words(workload.rate * workload.peak)}/s", why]
    trips = f"{costs.round_trips} for a new key, {costs.duplicate_round_trips} for a duplicate"
    yield ["round trips", f"{in_words(found.round_trips)}/s", trips]
    yield ["handlers at once", in_words(math.ceil(found.handlers)), f"each takes {_duration(workload.handler)}"]
    if found.connections is not None:
        held = "the handler, too" if workload.mode == "transactional" else "statements only"
        why = f"busy half of the time, with {held}; add one for each process"
        yield ["connections", in_words(found.connections), why]
    if found.cores is not None:
        yield ["cores of the server", in_words(found.cores), "one by one; batches need less"]
    if found.write_units is not None:
        yield ["write units", f"{in_words(found.write_units)}/s", "one for each KB that is written or refused"]


def _with(costs: Costs) -> str:
    if costs.in_memory:
        return "with its key and its place in the hash tables"
    return "with its key" if costs.billed_bytes else "with its indexes"


def _duration(seconds: float) -> str:
    return as_text(seconds) if seconds >= 1 else f"{seconds * 1000:g}ms"


def _purge(costs: Costs, found: Size) -> tuple[str, str]:
    if not found.purge:
        return "none", "nothing expires"
    if costs.purge_per_second is None:
        return f"{in_words(found.purge)}/s", "the server removes them by itself"
    return f"{in_words(found.purge)}/s", f"one onefold purge removes up to {in_words(costs.purge_per_second)}/s"
