"""The rules of leaks, on the few lines of one message or one key."""

from __future__ import annotations

import pytest

from onefold.trace.leaks import Leak, LeakKind, Repeated, Seen, Sent, of_keys, of_message

APP, GATEWAY, WORKER = "app", "gateway", "worker"


def found(*seen: tuple[str, str, float], order: tuple[str, ...] = (), tries: bool = True) -> list[Leak]:
    ranks = {hop: float(rank) for rank, hop in enumerate(order)}
    return list(of_message([Seen(*one) for one in seen], ranks, "m", tries=tries))


def test_a_key_that_stays_the_same_from_hop_to_hop_is_no_leak() -> None:
    assert found((APP, "a", 1), (GATEWAY, "a", 2), (WORKER, "a", 3)) == []


def test_the_hop_that_has_another_key_than_the_hop_before_has_replaced_it() -> None:
    assert found((APP, "a", 1), (GATEWAY, "a", 2), (WORKER, "b", 3)) == [
        Leak(LeakKind.REPLACED, WORKER, 3, "a", "b", GATEWAY, "m")
    ]


def test_a_key_that_goes_on_replaced_is_blamed_on_one_hop() -> None:
    assert [leak.hop for leak in found((APP, "a", 1), (GATEWAY, "b", 2), (WORKER, "b", 3))] == [GATEWAY]


def test_each_try_whose_key_is_replaced_counts() -> None:
    leaks = found((APP, "a", 1), (WORKER, "b", 2), (WORKER, "c", 9))

    assert [(leak.kind, leak.before, leak.after) for leak in leaks] == [
        (LeakKind.REPLACED, "a", "b"),
        (LeakKind.REPLACED, "a", "c"),
    ]


def test_a_try_that_does_not_pass_every_hop_is_no_leak() -> None:
    leaks = found((APP, "a", 1), (GATEWAY, "a", 2), (WORKER, "a", 3), (APP, "b", 7), (WORKER, "b", 8))

    assert [leak.kind for leak in leaks] == [LeakKind.REMINTED]


def test_a_message_with_two_keys_at_its_first_hop_was_given_a_new_one_there() -> None:
    leaks = found((APP, "a", 1), (WORKER, "a", 2), (APP, "b", 8), (WORKER, "b", 9))

    assert leaks == [Leak(LeakKind.REMINTED, APP, 8, "a", "b", None, "m")]


def test_a_request_with_two_keys_at_one_hop_says_nothing_of_tries() -> None:
    assert found((GATEWAY, "a", 1), (GATEWAY, "b", 2), tries=False) == []


def test_clocks_that_are_apart_do_not_matter_where_the_order_is_given() -> None:
    seen = ((WORKER, "b", 1.0), (GATEWAY, "a", 2.0))

    assert [leak.hop for leak in found(*seen)] == [GATEWAY]
    assert [leak.hop for leak in found(*seen, order=(GATEWAY, WORKER))] == [WORKER]


def sent(
    hour: int, times: int = 0, requests: tuple[str, str] | None = None, producers: tuple[str, str] | None = None
) -> Sent:
    return Sent(GATEWAY, "", "a", hour, times, *(requests or (None, None)), *(producers or (None, None)))


@pytest.mark.parametrize(
    ("rows", "leaks"),
    [
        ([sent(1, requests=("r1", "r1")), sent(2, requests=("r1", "r1"))], []),
        ([sent(1, requests=("r1", "r2"))], [(1, ("r1", "r2"), 0, 0)]),
        # The second one came in a later hour, and it is told once.
        (
            [sent(1, requests=("r2", "r2")), sent(2, requests=("r1", "r1")), sent(3, requests=("r3", "r3"))],
            [(2, ("r1", "r2"), 0, 0)],
        ),
        ([sent(1, 1, producers=("p", "p"))], []),
        ([sent(1, 3, producers=("p", "p"))], [(1, (), 2, 0)]),
        ([sent(1, 1, producers=("p", "p")), sent(2, 2, producers=("q", "q"))], [(2, (), 2, 2)]),
        ([sent(1), sent(2, 1, producers=("p", "p"))], []),
    ],
)
def test_what_leaks_of_a_key_is_told_in_the_hour_in_which_it_shows(
    rows: list[Sent], leaks: list[tuple[int, tuple[str, ...], int, int]]
) -> None:
    assert list(of_keys(rows)) == [
        Repeated(GATEWAY, hour, "", "a", requests, resent, restarted) for hour, requests, resent, restarted in leaks
    ]


def test_keys_are_told_apart_by_hop_and_scope() -> None:
    rows = [
        Sent(hop, scope, "a", 1, 1, "r", "r", "p", "p")
        for hop, scope in ((APP, ""), (APP, "tenant"), (GATEWAY, "tenant"))
    ]

    assert list(of_keys(rows)) == []
