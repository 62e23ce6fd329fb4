"""Statements that end a transaction and go on in another one, in ways that neither a driver nor its user sees.

After each of them a write would be committed without the record, if the COMMIT were simply sent.
"""

from __future__ import annotations

Statements = tuple[str, ...]

# What has to be there for some of them.
PREPARED: dict[str, Statements] = {
    "mariadb": (
        "CREATE OR REPLACE PROCEDURE rolls_back() BEGIN ROLLBACK; START TRANSACTION; END",
        "CREATE OR REPLACE PROCEDURE commits() BEGIN COMMIT; START TRANSACTION; END",
        "CREATE OR REPLACE PROCEDURE creates() BEGIN CREATE OR REPLACE TABLE inside (n INT); START TRANSACTION; END",
    ),
    "postgres": (),
    "sqlite": (),
}

ENDINGS: dict[str, dict[str, Statements]] = {
    "mariadb": {
        "BEGIN": ("BEGIN",),
        "COMMIT AND CHAIN": ("COMMIT AND CHAIN",),
        "ROLLBACK AND CHAIN after a comment": ("/* shop */ ROLLBACK AND CHAIN",),
        "BEGIN after a comment": ("-- shop\nBEGIN",),
        "START TRANSACTION after another comment": ("# shop\nSTART TRANSACTION",),
        "a comment that is executed": ("/*! ROLLBACK */", "/*!50000 START TRANSACTION */"),
        "a comment that MariaDB executes": ("/*M! START TRANSACTION */",),
        "SET STATEMENT": ("SET STATEMENT max_statement_time = 60 FOR START TRANSACTION",),
        "a compound statement that commits": ("BEGIN NOT ATOMIC COMMIT; START TRANSACTION; END",),
        "a compound statement that rolls back": ("BEGIN NOT ATOMIC ROLLBACK; START TRANSACTION; END",),
        "EXECUTE IMMEDIATE": ("EXECUTE IMMEDIATE 'COMMIT'", "EXECUTE IMMEDIATE 'START TRANSACTION'"),
        "PREPARE": ("PREPARE ending FROM 'ROLLBACK AND CHAIN'", "EXECUTE ending"),
        "a procedure that commits": ("CALL commits()",),
        "a procedure that rolls back": ("CALL rolls_back()",),
        "a procedure that changes a table": ("CALL creates()",),
        "DDL": ("/* shop */ CREATE OR REPLACE TABLE outside (number INTEGER)", "BEGIN"),
        "autocommit, on and off": ("SET autocommit = 1", "SET autocommit = 0"),
        "LOCK TABLES": ("LOCK TABLES wallet WRITE", "UNLOCK TABLES", "BEGIN"),
        "XA": ("COMMIT", "XA START 'shop'", "XA END 'shop'", "XA ROLLBACK 'shop'", "BEGIN"),
        # The last one: a caller's own pool hands the setting on.
        "completion_type": ("SET completion_type = 1", "ROLLBACK"),
    },
    "postgres": {
        "COMMIT AND CHAIN": ("COMMIT AND CHAIN",),
        "ROLLBACK AND CHAIN after a comment": ("/* shop */ ROLLBACK AND CHAIN",),
        "END": ("END", "-- shop\nBEGIN"),
        "ABORT": ("ABORT", "START TRANSACTION"),
    },
    "sqlite": {
        "END": ("/* shop */ END", "-- shop\nBEGIN"),
        "ROLLBACK": ("/* shop */ ROLLBACK TRANSACTION", "BEGIN IMMEDIATE"),
    },
}
