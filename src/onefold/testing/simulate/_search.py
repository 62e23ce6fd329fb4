"""Explore every history of a scenario, each world once, and show the shortest way to a violation as a story."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from onefold.testing.simulate._scenario import Scenario
from onefold.testing.simulate._statements import Violation
from onefold.testing.simulate._world import Action, Physics

# Progress is reported this often.
TOLD_EVERY = 2_000


class Story(NamedTuple):
    """A history that breaks an invariant: readable lines, and the actions to run it again."""

    scenario: Scenario
    number: int
    violation: str
    actions: tuple[Action, ...]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        numbered = (f"{number:3}. {line}" for number, line in enumerate(self.lines, 1))
        broken = (f"     invariant {self.violation}",) if self.violation else ()
        return "\n".join((f"{self.scenario.name}:", *numbered, *broken))

    @property
    def code(self) -> str:
        """Return the story as text for `read_code`; it holds the whole scenario, except a custom store."""
        scenario = msgspec.to_builtins(self.scenario, enc_hook=lambda _store: None)
        actions = [[action.who, action.way, action.fault] for action in self.actions]
        return msgspec.json.encode({"scenario": scenario, "actions": actions}).decode()


class Report(NamedTuple):
    """The result of a search."""

    scenario: Scenario
    states: int
    histories: int
    story: Story | None = None


class Laws(Protocol):
    """The possible events, and their consequences: claims and leases, or transactions."""

    def first(self) -> Any: ...
    def actions(self, world: Any) -> Any: ...
    def apply(self, world: Any, action: Action) -> Any: ...
    def close(self, world: Any, lines: list[str]) -> None: ...
    def tell(self, world: Any, action: Action, after: Any) -> str: ...


def search(scenario: Scenario, *, progress: Callable[[int], object] = lambda _states: None) -> Report:
    """Explore every history of the scenario, the short ones first; stop at the first violation."""
    laws = laws_of(scenario)
    first = laws.first()
    came_from: dict[Any, tuple[Any, Action] | None] = {first: None}
    followers: dict[Any, list[Any]] = {}
    waiting = deque([first])
    while waiting:
        world = waiting.popleft()
        followers[world] = []
        if len(followers) % TOLD_EVERY == 0:
            progress(len(followers))
        try:
            action = None
            for action in laws.actions(world):
                after = laws.apply(world, action)
                followers[world].append(after)
                if after not in came_from:
                    came_from[after] = (world, action)
                    waiting.append(after)
            if action is None:
                laws.close(world, [])
        except Violation as violation:
            actions = _way_to(came_from, world) + (() if action is None else (action,))
            return Report(scenario, len(followers), 0, tell(scenario, actions, violation))
    return Report(scenario, len(followers), _count(first, followers))


def laws_of(scenario: Scenario) -> Laws:
    if scenario.mode == "transactional":
        if scenario.cancels:
            from onefold.testing.simulate._cancellations import Cancellations

            return Cancellations(scenario)
        from onefold.testing.simulate._transactions import Transactions

        return Transactions(scenario)
    if scenario.migrating:
        from onefold.testing.simulate._migration import Migrating

        return Migrating(scenario)
    return Physics(scenario)


def read_code(code: str) -> tuple[Scenario, tuple[Action, ...]]:
    """Return the scenario and the actions of a story's `code`."""
    parts = msgspec.json.decode(code)
    fields = {name: value for name, value in parts["scenario"].items() if value is not None}
    scenario = Scenario(**fields | {"steps": tuple(fields["steps"]), "ignoring": frozenset(fields["ignoring"])})
    return scenario, tuple(Action(*action) for action in parts["actions"])


def tell(scenario: Scenario, actions: Sequence[Action], violation: Violation | None = None) -> Story:
    """Run these actions again, and describe what happens."""
    laws = laws_of(scenario)
    world = laws.first()
    lines: list[str] = []
    try:
        for action in actions:
            try:
                after = laws.apply(world, action)
            except Violation:
                lines.append(laws.tell(world, action, None))
                raise
            lines.append(laws.tell(world, action, after))
            world = after
        if not any(True for _ in laws.actions(world)):
            laws.close(world, lines)
    except Violation as broken:
        violation = broken
    number, broken_how = (violation.number, str(violation)) if violation is not None else (0, "")
    return Story(scenario, number, broken_how, tuple(actions), tuple(lines))


def _way_to(came_from: dict[Any, tuple[Any, Action] | None], world: Any) -> tuple[Action, ...]:
    actions: list[Action] = []
    step = came_from[world]
    while step is not None:
        world, action = step
        actions.append(action)
        step = came_from[world]
    return tuple(reversed(actions))


def _count(first: Any, followers: dict[Any, list[Any]]) -> int:
    """Count the histories: the paths from the first world to the final ones."""
    paths: dict[Any, int] = {}
    stack = [(first, False)]
    while stack:
        world, seen = stack.pop()
        if seen:
            paths[world] = sum(paths[after] for after in followers[world]) if followers[world] else 1
        elif world not in paths:
            stack.append((world, True))
            stack.extend((after, False) for after in followers[world] if after not in paths)
    return paths[first]
