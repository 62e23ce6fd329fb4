"""DynamoDB, and SQS beside it, as the wheel ministack emulates them, in memory: what is killed is forgotten."""

from __future__ import annotations

import importlib.metadata
import sys
import urllib.request

from services.home import Home
from services.processes import HOST, Daemon, free_port
from services.programs import wheel_folder
from services.servers import Server

REGION = "eu-central-1"

# The emulator takes anybody's word, but the clients insist on giving it.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "onefold", "AWS_SECRET_ACCESS_KEY": "onefold"}


def start_dynamodb(home: Home) -> Server:
    wheel_folder("ministack", "ministack")
    folder, port = home.room("dynamodb"), free_port()
    url = f"http://{HOST}:{port}"
    daemon = Daemon(
        "dynamodb",
        [sys.executable, "-m", "ministack"],
        folder,
        answers=lambda: _answers(url),
        environment={
            "BIND_HOST": HOST,
            "GATEWAY_PORT": str(port),
            "SERVICES": "dynamodb,sqs",
            "LOG_LEVEL": "WARNING",
            "TMPDIR": str(folder),
        },
    )
    home.keep(daemon)
    return Server("dynamodb", url, importlib.metadata.version("ministack"), "wheel ministack", [daemon])


def _answers(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/_ministack/health", timeout=5) as reply:
        return bool(reply.status == 200)


def store_url(server: Server, table: str) -> str:
    return f"dynamodb://{table}?endpoint_url={server.url}&region={REGION}"


def delete_tables(server: Server, prefix: str) -> None:
    import boto3

    client = boto3.client(
        "dynamodb",
        endpoint_url=server.url,
        region_name=REGION,
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )
    for page in client.get_paginator("list_tables").paginate():
        for name in page["TableNames"]:
            if name.startswith(prefix):
                client.delete_table(TableName=name)
    client.close()
