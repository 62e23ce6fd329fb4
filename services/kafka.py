"""Kafka as librdkafka's own mock cluster plays it: real sockets on the loopback, groups, commits and rebalances.

It has no transactions and keeps nothing: what is killed is forgotten, and comes back on another port. No Kafka broker
can be had as a package; a real one named in ONEFOLD_KAFKA_URL is used instead. Run as a program, this is the cluster.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

from services.home import PROJECT, Home
from services.processes import Daemon
from services.programs import wheel_folder
from services.servers import Server

ORIGIN = "librdkafka's mock cluster: no transactions, no persistence"
SCHEME = "kafka://"
BROKERS = 1

# What the mock gives a topic that it creates by itself; a real cluster is asked for as many.
PARTITIONS = 4

# How long a real cluster may take to create a topic.
CREATE_SECONDS_MAX = 30.0

PRODUCER = 0
ERROR_BYTES = 512


def start_kafka(home: Home) -> Server:
    wheel_folder("confluent_kafka", "confluent-kafka")
    import confluent_kafka

    folder = home.room("kafka")
    file = folder / "bootstrap.txt"
    daemon = Daemon(
        "kafka",
        [sys.executable, "-m", "services.kafka", str(file)],
        folder,
        answers=lambda: bool(file.read_text()),
        environment={"PYTHONPATH": str(PROJECT)},
    )
    home.keep(daemon)
    return Server("kafka", SCHEME + file.read_text(), confluent_kafka.libversion()[0], ORIGIN, [daemon])


def bootstrap(url: str) -> str:
    """What clients call `bootstrap.servers`; the URL is `kafka://host:port,host:port`, or that list alone."""
    return url.removeprefix(SCHEME).rstrip("/")


def create_topic(server: Server, topic: str) -> None:
    """A topic with `PARTITIONS` partitions. The mock creates what it is asked about, and cannot be told to."""
    from confluent_kafka import cimpl
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": bootstrap(server.url), "log_level": 2})
    if server.origin.startswith("ONEFOLD_"):
        admin.create_topics([cimpl.NewTopic(topic, PARTITIONS, 1)])[topic].result(CREATE_SECONDS_MAX)
    else:
        admin.list_topics(topic, timeout=CREATE_SECONDS_MAX)


def serve(file: Path) -> None:
    """Be the cluster until a signal comes. Its bootstrap servers are written once they can be used."""
    # A signal that waits is answered below, and not by the client's own threads.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    from confluent_kafka import cimpl

    # The extension brings the library with it, wherever the wheel has put it.
    library = ctypes.CDLL(str(cimpl.__file__))
    library.rd_kafka_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    why = ctypes.create_string_buffer(ERROR_BYTES)
    client = ctypes.c_void_p(library.rd_kafka_new(PRODUCER, None, why, ctypes.c_size_t(ERROR_BYTES)))
    if not client.value:
        raise SystemExit(why.value.decode())
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(client, BROKERS))
    # By default the first of a group waits three seconds for others.
    library.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, ctypes.c_int32(0))
    partial = file.with_suffix(".part")
    partial.write_text(library.rd_kafka_mock_cluster_bootstraps(cluster).decode())
    partial.rename(file)
    signal.sigwait(signals)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
