"""`python -m services up [names]`, `down`, `status`, `install`: servers that stay until they are taken down."""

from __future__ import annotations

import argparse
import sys

from services import state
from services.home import Home
from services.house import NAMES, start
from services.processes import ServerFailed
from services.programs import Missing, install
from services.servers import Server


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start what does not run yet, and leave it running")
    up.add_argument("names", nargs="*", metavar="name", help=f"some of: {', '.join(NAMES)}; without one, all")
    commands.add_parser("down", help="end what `up` has started, and remove its data")
    commands.add_parser("status", help="list what `up` has started")
    commands.add_parser("install", help="install the packages: Debian's (as root), or Homebrew's")
    asked = parser.parse_args()
    match asked.command:
        case "up":
            unknown = sorted(set(asked.names) - set(NAMES))
            if unknown:
                parser.error(f"no such server: {', '.join(unknown)}; there are {', '.join(NAMES)}")
            with state.alone():
                return bring_up(asked.names or list(NAMES))
        case "down":
            with state.alone():
                return take_down()
        case "status":
            return show()
        case _:
            return fetch()


def bring_up(names: list[str]) -> int:
    """Start them one by one; what is missing is told, and does not keep the others from starting."""
    home, missing = Home(state.folder(), watched=False), 0

    def found(name: str) -> Server:
        entry = state.recall(name)
        if entry is None or not entry.running:
            if entry is not None:
                state.end(entry)
            entry = state.remember(start(home, name, found))
        return Server(name, entry.url, entry.version, entry.origin)

    for name in names:
        try:
            tell(found(name))
        except Missing as error:
            missing += 1
            print(f"{name:<15} missing: {error}", file=sys.stderr)
        except ServerFailed as error:
            print(f"{name:<15} failed: {error}", file=sys.stderr)
            return 1
    return 1 if missing == len(names) else 0


def take_down() -> int:
    """End them all, but for those that a test session uses just now."""
    leases, used = state.Leases(), 0
    for entry in state.recall_all():
        if entry.running and leases.take(entry.name) is None:
            used += 1
            print(f"{entry.name:<15} is in use by a test session: try again when that has ended", file=sys.stderr)
            continue
        state.end(entry)
        print(f"{entry.name:<15} ended")
    leases.close()
    state.sweep()
    return 1 if used else 0


def show() -> int:
    for entry in state.recall_all():
        tell(Server(entry.name, entry.url, entry.version, entry.origin if entry.running else "not running any more"))
    return 0


def fetch() -> int:
    try:
        install()
    except Missing as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def tell(server: Server) -> None:
    print(f"{server.name:<15} {server.version:<26} {server.url}  ({server.origin})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
