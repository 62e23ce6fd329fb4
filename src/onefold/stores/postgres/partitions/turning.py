"""Seal the current partition, and drop a sealed one: each as one message, in a transaction of its own.

Both take an exclusive lock, for which they wait only briefly, because every claim waits behind them. While a partition
is locked no client is waited for: the server does the whole work by itself. Only one process does it at a time.
"""

# ruff: noqa: S608 - statements are made of names and numbers of our own, never of values

from __future__ import annotations

from typing import Final

from onefold.stores.postgres.partitions.layout import (
    ALONE,
    BEGAN,
    HOME,
    NOW,
    OUR_TRIGGER,
    REFUSED,
    SEALED,
    TO_GRANTEE,
    TRIGGER,
    WITH_PAGES,
    WITH_TRIGGER,
    owned_by,
)
from onefold.stores.postgres.statements.fragments import DUE_SECONDS
from onefold.stores.sql.records import IN_DOUBT_SECONDS_MIN, TABLE

# Each claim looks into every sealed partition. With more than these, the current one is not sealed: it grows.
SEALED_MAX: Final = 40

# A partition whose last records these are is emptied of them, and dropped. They are moved under its lock.
MOVED_MAX: Final = 1_000

# Up to this size the records of a partition are counted as it is dropped, in a few milliseconds. Those of a larger one
# were counted by the last vacuum.
COUNTED_BYTES: Final = 8 * 1024 * 1024

# After a lock that could not be had, whoever purges leaves it alone for so long: claims have waited behind it.
RETRY_SECONDS: Final = 60

# Beyond these many periods, expired records do not wait for the end of their partition: they are deleted.
PERIODS_MAX: Final = 2

# From here on, `due` says that a record runs or is held, and never expires.
_IN_DOUBT: Final = round(IN_DOUBT_SECONDS_MIN / DUE_SECONDS)

_ALONE: Final = f"pg_try_advisory_xact_lock({ALONE})"

# What was done last is in a comment on the table above the sealed ones: a statement of this kind returns nothing, and a
# second one in its transaction would keep the locks until the client has sent it. A comment locks nobody out.
_NOTE: Final = "EXECUTE format('COMMENT ON TABLE %s IS %L', sealed, {});"
LOCKED: Final = "locked"
DROPPED: Final = "dropped"
MOVED: Final = "moved"
STUCK: Final = "stuck"

_TRIED: Final = f"substring(obj_description(sealed, 'pg_class') FROM '^{LOCKED} ([0-9.]+)$')::double precision"
_LOCKED: Final = _NOTE.format(f"'{LOCKED} ' || {NOW}")
_GIVE_UP: Final = f"{_LOCKED} RETURN;"

# A statement_timeout may be shorter than our wait.
_NOT_LOCKED: Final = "lock_not_available OR query_canceled OR deadlock_detected"

# The tablespace of a table or index; that of the database has no name here, as in the setting.
_PLACE: Final = "COALESCE((SELECT spcname FROM pg_tablespace WHERE oid = reltablespace), '')"

# PostgreSQL would cut a longer name off, and two could become one.
_NAME_BYTES: Final = 63

# The age of the current partition, NULL if the table is not partitioned; whether this user may seal and drop; how many
# are sealed; what was done last; and by whom this is answered.
LOOK: Final = (
    f"SELECT (SELECT {NOW} - {BEGAN} FROM {OUR_TRIGGER} = main.oid), pg_has_role(current_user, relowner, 'USAGE'), "
    "(SELECT count(*) FROM pg_inherits AS below WHERE below.inhparent = sealed.inhrelid), "
    "obj_description(sealed.inhrelid, 'pg_class'), pg_backend_pid() "
    "FROM pg_class AS main JOIN pg_inherits AS sealed ON sealed.inhparent = main.oid "
    f"WHERE main.oid = to_regclass('{TABLE}')"
)

# What is looked up under a lock has to be what is true then, not when the transaction began. The level may be the
# default of a role or a database. A clock that was set back must not stop it until it has caught up. And without
# statistics the planner may read a whole partition, under its lock, for the few records that an index would find.
_BEGIN: Final = f"""
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        COMMIT;
        SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    END IF;
    IF NOT {_ALONE} THEN
        RETURN;
    END IF;
    {HOME}
    main := format('%I.%I', home, base);
    sealed := format('%I.{SEALED}', home);
    IF abs({NOW} - {_TRIED}) < {{retry}} THEN
        RETURN;
    END IF;
    PERFORM set_config('lock_timeout', '{{wait}}', true), set_config('enable_seqscan', 'off', true);
"""

_SEAL: Final = f"""
DO $onefold$
DECLARE
    home name; base name; kind "char"; main regclass; sealed regclass; began double precision; there boolean;
    old name; one record; made text[]; options text; owned name; place text; left_behind text;
BEGIN
    {_BEGIN}
    SELECT {BEGAN} INTO began FROM {OUR_TRIGGER} = main;
    EXECUTE format('SELECT EXISTS (SELECT FROM ONLY %s)', main) INTO there;
    IF began IS NULL OR abs({NOW} - began) < {{period}} OR NOT there
        OR (SELECT count(*) FROM pg_inherits WHERE inhparent = sealed) >= {SEALED_MAX} THEN
        RETURN;
    END IF;
    {REFUSED.strip()}
    BEGIN
        EXECUTE format('LOCK TABLE ONLY %s, ONLY %s IN ACCESS EXCLUSIVE MODE', main, sealed);
    EXCEPTION WHEN {_NOT_LOCKED} THEN {_GIVE_UP}
    END;
    SELECT array_to_string(reloptions, ', '), pg_get_userbyid(relowner), {_PLACE} INTO options, owned, place
        FROM pg_class WHERE oid = main;
    old := format('%s_%s_%s', base, to_char(timezone('UTC', clock_timestamp()), 'YYYYMMDD'), txid_current());
    EXECUTE format('DROP TRIGGER {TRIGGER} ON %s', main);
    EXECUTE format('ALTER TABLE %s NO INHERIT %s', sealed, main);
    FOR one IN SELECT relname, indexrelid, pg_get_indexdef(indexrelid) AS made, indisprimary, {_PLACE} AS place,
            overlay(relname::text PLACING old FROM 1 FOR length(base)) AS after FROM pg_index
        JOIN pg_class ON pg_class.oid = indexrelid WHERE indrelid = main LOOP
        EXECUTE format('ALTER INDEX %I.%I RENAME TO %I', home, one.relname,
            CASE WHEN starts_with(one.relname, base) AND octet_length(one.after) <= {_NAME_BYTES} THEN one.after
            ELSE old || '_' || one.indexrelid END);
        made := made || format('SET LOCAL default_tablespace = %L', one.place) || one.made;
        IF one.indisprimary THEN
            made := made || format('ALTER TABLE %I.%I ADD PRIMARY KEY USING INDEX %I', home, base, one.relname);
        END IF;
    END LOOP;
    EXECUTE format('ALTER TABLE %s RENAME TO %I', main, old);
    PERFORM set_config('default_tablespace', place, true);
    EXECUTE format('CREATE TABLE %1$I.%2$I (LIKE %1$I.%3$I INCLUDING ALL EXCLUDING INDEXES) WITH (%4$s)', home, base,
        old, COALESCE(options, 'fillfactor = 100'));
    FOR number IN 1 .. cardinality(made) LOOP
        EXECUTE made[number];
    END LOOP;
    {WITH_PAGES}
    {owned_by("format('%I.%I', home, base)", "owned")}
    FOR one IN SELECT NULL::name AS field, privilege_type AS what, is_grantable, grantee
            FROM pg_class, aclexplode(relacl) WHERE oid = main
        UNION ALL SELECT attname, privilege_type, is_grantable, grantee
            FROM pg_attribute, aclexplode(attacl) WHERE attrelid = main LOOP
        EXECUTE format('GRANT %s%s ON %I.%I TO %s%s', one.what, COALESCE(' (' || quote_ident(one.field) || ')', ''),
            home, base, {TO_GRANTEE}, CASE WHEN one.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END);
    END LOOP;
    EXECUTE format('ALTER TABLE %s INHERIT %I.%I', sealed, home, base);
    EXECUTE format('ALTER TABLE %I.%I INHERIT %s', home, old, sealed);
    {WITH_TRIGGER}
END $onefold$
"""

# Records are found by `due`, the ten minutes in which they expire, and ten more minutes later. Those that are moved are
# deleted in a transaction before the one that drops their partition. Whoever has waited for it at REPEATABLE READ looks
# for them where they were: there it meets a deleted record, which is a serialization failure. It would not look into a
# partition that is gone, and take the record for lost.
_DROP: Final = f"""
DO $onefold$
DECLARE
    home name; base name; kind "char"; main regclass; sealed regclass; part regclass; is_locked boolean := false;
    last integer; kept bigint; moved bigint; running boolean; counted bigint; stuck text; has_expired boolean;
    ended integer := floor({NOW} / {DUE_SECONDS})::integer - 1;
BEGIN
    {_BEGIN}
    FOR part IN SELECT inhrelid FROM pg_inherits WHERE inhparent = sealed ORDER BY inhrelid LOOP
        LOOP
            EXECUTE format('SELECT (SELECT max(due) FROM ONLY %1$s WHERE due < {_IN_DOUBT}), '
                '(SELECT count(*) FROM (SELECT FROM ONLY %1$s WHERE due >= {_IN_DOUBT} LIMIT {MOVED_MAX + 1}) AS a) + '
                '(SELECT count(*) FROM (SELECT FROM ONLY %1$s WHERE due IS NULL LIMIT {MOVED_MAX + 1}) AS b), '
                'EXISTS (SELECT FROM ONLY %1$s WHERE due >= {_IN_DOUBT} AND lease_until > {NOW}), '
                'EXISTS (SELECT FROM ONLY %1$s WHERE due < %2$s)', part, ended)
                INTO last, kept, running, has_expired;
            IF has_expired AND (last > ended + {{far}} OR kept > {MOVED_MAX} OR running AND last < ended - {{far}}) THEN
                stuck := COALESCE(stuck, format('%I.%I', home, (SELECT relname FROM pg_class WHERE oid = part)));
            END IF;
            EXIT WHEN last >= ended OR kept > {MOVED_MAX} OR running OR is_locked;
            BEGIN
                EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', part);
            EXCEPTION WHEN {_NOT_LOCKED} THEN {_GIVE_UP}
            END;
            -- Look again, now that nobody can change it.
            is_locked := true;
        END LOOP;
        IF is_locked THEN
            EXIT WHEN last >= ended OR kept > {MOVED_MAX} OR running;
            IF kept > 0 THEN
                EXECUTE format('WITH moved AS '
                    '(DELETE FROM ONLY %2$s WHERE due IS NULL OR due >= {_IN_DOUBT} RETURNING *) '
                    'INSERT INTO %1$s (%3$s) SELECT %3$s FROM moved', main, part,
                    (SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute
                    WHERE attrelid = main AND attnum > 0 AND NOT attisdropped AND attgenerated = ''));
                GET DIAGNOSTICS moved = ROW_COUNT;
                IF moved <> kept THEN
                    RAISE EXCEPTION 'onefold: % of % records could be moved out of %', moved, kept, part;
                END IF;
                {_NOTE.format(f"format('{MOVED} %s %s %s', moved, pg_backend_pid(), {NOW})")}
                RETURN;
            END IF;
            IF pg_relation_size(part) < {COUNTED_BYTES} THEN
                EXECUTE format('SELECT count(*) FROM ONLY %s', part) INTO counted;
            ELSE
                counted := GREATEST((SELECT reltuples FROM pg_class WHERE oid = part), pg_stat_get_live_tuples(part));
            END IF;
            EXECUTE format('DROP TABLE %s', part);
            {_NOTE.format(f"format('{DROPPED} %s %s %s', counted, pg_backend_pid(), {NOW})")}
            RETURN;
        END IF;
    END LOOP;
    IF stuck IS DISTINCT FROM substring(obj_description(sealed, 'pg_class') FROM '^{STUCK} (.*)$') THEN
        {_NOTE.format(f"'{STUCK} ' || stuck")}
    END IF;
END $onefold$
"""


def sealing(*, period: float, wait: str, retry: float = RETRY_SECONDS) -> str:
    """Return the statement that seals the current partition, if it is as old as a period and not empty."""
    return _filled(_SEAL, period=repr(period), wait=wait, retry=repr(retry))


def dropping(*, period: float, wait: str, retry: float = RETRY_SECONDS) -> str:
    """Return the statement that drops one sealed partition, if all that it holds has expired or can be moved."""
    return _filled(_DROP, far=str(round(PERIODS_MAX * period / DUE_SECONDS)), wait=wait, retry=repr(retry))


def _filled(statement: str, **values: str) -> str:
    for name, value in values.items():
        statement = statement.replace(f"{{{name}}}", value)
    return statement
