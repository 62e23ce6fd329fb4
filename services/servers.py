"""What a test sees of a running server: its URL, its version, and the faults that it can be made to have."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from services.processes import Daemon


@dataclass
class Server:
    """One running server, or a few that are one (a cluster).

    The faults work on servers that were started from here; one that the environment names has no processes to harm.
    """

    name: str
    url: str
    version: str = ""
    # Where it came from: a wheel, a program of the system, the environment, or `python -m services up`.
    origin: str = ""
    daemons: list[Daemon] = field(default_factory=list, repr=False)
    # Whom the faults hit; without a word about it, all of them.
    victims: list[Daemon] = field(default_factory=list, repr=False)

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def kill(self) -> None:
        """SIGKILL: a crash."""
        for daemon in self._victims():
            daemon.kill()

    def restart(self) -> None:
        """Once more on the same port and the same data, after a kill or in order."""
        for daemon in self._victims():
            daemon.end()
            daemon.start()

    def stop(self) -> None:
        """SIGSTOP: it holds its connections and answers nobody, until `cont`."""
        for daemon in self._victims():
            daemon.stop()

    def cont(self) -> None:
        for daemon in self._victims():
            daemon.cont()

    def end(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.end()

    def _victims(self) -> list[Daemon]:
        if not self.daemons:
            raise RuntimeError(f"{self.name} at {self.url} was not started here: ask for a server of your own")
        return self.victims or self.daemons
