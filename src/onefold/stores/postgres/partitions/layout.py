"""The layout of a partitioned table, and why an address has one record in all partitions together.

`onefold_records` is the current partition: every claim writes to it, and its primary key keeps claims apart as always.
Once a period it is *sealed*: it gets another name, an empty table takes its place, and inherits from nothing. The
sealed ones are its children, below `onefold_records_sealed`, which stays empty: so every statement that reads, changes
or deletes records through `onefold_records` reaches them all, and an INSERT reaches only the current one.

A trigger lets no record into the current partition while a sealed one has a record of the same address. One that has
expired is deleted first. Why no second one can slip in:

- A sealed partition never gets a new record. Sealing takes an exclusive lock, so it waits for every transaction that
  has written to the partition: whatever was claimed there is committed, or gone, before the next one is current.
- The trigger looks with a snapshot that is younger than its statement's lock on the current partition, so it sees all
  of that. At REPEATABLE READ and SERIALIZABLE the snapshot may be older than the sealing. The trigger knows the sealing
  transaction by its number, and raises a serialization failure if the snapshot does not show it.
- An expired record may be renewed or ended at the same moment, by a transaction that is not committed yet, or that the
  snapshot does not show. The deletion waits for it, and finds the record alive; or fails, as any write from an old
  snapshot.
- Records that outlive their partition are moved to the current one, whose primary key guards them. Until that commits,
  everybody waits for the lock on the partition that they come from.

All of it is in the database: it holds for every client, whatever it knows about partitions.
"""

# ruff: noqa: S608 - statements are made of names and numbers of our own, never of values

from __future__ import annotations

from typing import Final

from onefold.stores.sql.records import TABLE

SEALED: Final = f"{TABLE}_sealed"
FUNCTION: Final = f"{TABLE}_once"
TRIGGER: Final = "onefold_partitions"
KEPT_INDEX: Final = f"{TABLE}_kept"

# How long the creation of the trigger waits for transactions that are writing. Claims wait behind it: for one that has
# been open for long already, it does not wait at all. Each delivery would try it again.
LAYOUT_WAIT: Final = "5s"
LONG_OPEN: Final = "2 seconds"

# The number of the last sealing transaction, and when that was, as arguments of the trigger. These are read from the
# catalog, which shows what is true now, not what was true at the time of an old snapshot.
_ARGUMENTS: Final = "encode(tgargs, 'escape')"
_SEPARATOR: Final = "E'\\\\000'"
OUR_TRIGGER: Final = f"pg_trigger WHERE tgname = '{TRIGGER}' AND tgrelid"
BEGAN: Final = f"split_part({_ARGUMENTS}, {_SEPARATOR}, 2)::double precision"

# How many triggers of ours the table has, and which table it is: each partition that is sealed leaves a new one.
IS_LAID_OUT: Final = f"SELECT count(*), to_regclass('{TABLE}')::oid::bigint FROM {OUR_TRIGGER} = to_regclass('{TABLE}')"

# One at a time lays out, seals or drops: of a table that is renamed at this moment, a statement may find the name and
# miss the trigger. The bytes of "onefold" and one more: not the lock of those who create tables.
ALONE: Final = 8029466676278617089

# Where the table is. Its name is written only in quotes here, where it is qualified by its schema (`located`).
HOME: Final = (
    "SELECT nspname, relname, relkind INTO home, base, kind FROM pg_class JOIN pg_namespace "
    f"ON pg_namespace.oid = relnamespace WHERE pg_class.oid = '{TABLE}'::regclass;"
)

# What names this very table, and would stay with it once it is sealed. Nobody would notice. And a subscriber to all
# tables of a database or schema ends when it meets a table that it does not have.
REFUSED: Final = f"""
    SELECT string_agg(DISTINCT what, ', ') INTO left_behind FROM (
        SELECT 'row-level security' AS what FROM pg_class WHERE oid = '{TABLE}'::regclass AND relrowsecurity
        UNION ALL SELECT 'a publication' FROM pg_publication_tables WHERE schemaname = home AND tablename = base
        UNION ALL SELECT CASE ev_class WHEN '{TABLE}'::regclass THEN 'a rule' ELSE 'the view ' || ev_class::regclass END
            FROM pg_rewrite JOIN pg_depend ON classid = 'pg_rewrite'::regclass AND objid = pg_rewrite.oid
            WHERE refclassid = 'pg_class'::regclass AND refobjid = '{TABLE}'::regclass
        UNION ALL SELECT 'a foreign key' FROM pg_constraint
            WHERE contype = 'f' AND '{TABLE}'::regclass IN (conrelid, confrelid)
        UNION ALL SELECT 'the trigger ' || tgname FROM pg_trigger
            WHERE tgrelid = '{TABLE}'::regclass AND NOT tgisinternal AND tgname <> '{TRIGGER}') AS found;
    IF left_behind IS NOT NULL THEN
        RAISE EXCEPTION 'the table has %, which would stay behind with a sealed partition', left_behind
            USING ERRCODE = 'feature_not_supported';
    END IF;
"""

# Without quotes: it is a part of quoted texts.
NOW: Final = "extract(epoch FROM clock_timestamp())::double precision"

_OF_ADDRESS: Final = (
    f"FROM %1$I.{SEALED} AS sealed "
    "WHERE sealed.scope = NEW.scope AND sealed.operation = NEW.operation AND sealed.key = NEW.key"
)

# The trigger fires before the primary key is checked. Its snapshot: see above. A number above all that were given is
# from another server, whose dump was restored here, and says nothing. It looks with the rights of the tables' owner:
# whoever may write to the current partition needs no permission for the others. There is hardly ever one to delete.
_ONCE: Final = f"""
CREATE OR REPLACE FUNCTION %1$I.{FUNCTION}() RETURNS trigger LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $once$
BEGIN
    IF NOT txid_visible_in_snapshot(TG_ARGV[0]::bigint, txid_current_snapshot()) THEN
        IF TG_ARGV[0]::bigint <= txid_current() THEN
            RAISE EXCEPTION 'could not serialize access: a partition was sealed after this transaction began'
                USING ERRCODE = 'serialization_failure', HINT = 'The transaction might succeed if retried.';
        END IF;
    END IF;
    PERFORM {_OF_ADDRESS} LIMIT 1;
    IF NOT FOUND THEN
        RETURN NEW;
    END IF;
    DELETE {_OF_ADDRESS} AND sealed.expires <= {NOW};
    PERFORM {_OF_ADDRESS} LIMIT 1;
    IF FOUND THEN
        RETURN NULL;
    END IF;
    RETURN NEW;
END $once$
"""

WITH_TRIGGER: Final = (
    f"EXECUTE format('CREATE TRIGGER {TRIGGER} BEFORE INSERT ON %1$I.%2$I FOR EACH ROW EXECUTE FUNCTION "
    f"%1$I.{FUNCTION}(%3$L, %4$L)', home, base, txid_current(), {NOW});"
)

# The current partition gets some pages while it is empty. The planner reads an empty table as a whole, and a prepared
# statement would still do so when it is full: for a table that has children it assumes no minimum.
_ROWS_BEFORE: Final = 400
WITH_PAGES: Final = (
    "EXECUTE format('INSERT INTO %I.%I "
    "(began, changed, attempt, revision, scope, operation, key, state, token, remark) "
    "SELECT 0, 0, 0, 0, '''', '''', number::text, '''', '''', repeat(''-'', 200) "
    f"FROM generate_series(1, {_ROWS_BEFORE}) AS number', home, base); "
    "EXECUTE format('DELETE FROM ONLY %I.%I WHERE operation = ''''', home, base);"
)

TO_GRANTEE: Final = "CASE one.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(one.grantee)) END"


def owned_by(table: str, owner: str) -> str:
    """Return what gives a new table to this owner, and takes from it what default privileges have granted on it."""
    return f"""
    IF {owner} <> current_user THEN
        EXECUTE format('ALTER TABLE %s OWNER TO %I', {table}, {owner});
    END IF;
    FOR one IN SELECT DISTINCT grantee FROM pg_class, aclexplode(relacl)
        WHERE pg_class.oid = {table}::regclass AND grantee <> relowner LOOP
        EXECUTE format('REVOKE ALL ON TABLE %s FROM %s', {table}, {TO_GRANTEE});
    END LOOP;
""".strip()


# Nobody can write to a table while an index is built. On a larger table that would be noticed, and it is refused.
BUILT_BYTES: Final = 256 * 1024 * 1024

# Built with CONCURRENTLY, it may have failed halfway.
_INDEX_IS_THERE: Final = f"""
    SELECT indisvalid INTO there FROM pg_index WHERE indrelid = '{TABLE}'::regclass
        AND indexrelid = to_regclass(format('%I.{KEPT_INDEX}', home));
    IF NOT there THEN
        RAISE EXCEPTION 'the index {KEPT_INDEX} is not valid. Build it again: REINDEX INDEX CONCURRENTLY %.%',
            quote_ident(home), '{KEPT_INDEX}' USING ERRCODE = 'feature_not_supported';
    END IF;
    IF there IS NULL AND pg_relation_size('{TABLE}'::regclass) > {BUILT_BYTES} THEN
        RAISE EXCEPTION 'the table is too large (%) to be locked while an index is built. Build it first: '
            'CREATE INDEX CONCURRENTLY {KEPT_INDEX} ON %.% (due) WHERE due IS NULL',
            pg_size_pretty(pg_relation_size('{TABLE}'::regclass)), quote_ident(home), quote_ident(base)
            USING ERRCODE = 'feature_not_supported';
    END IF;
"""

_NOBODY_WRITES: Final = f"""
    SELECT pid INTO writer FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE relation = '{TABLE}'::regclass AND database = datid AND mode = 'RowExclusiveLock' AND granted
        AND datname = current_database() AND xact_start < clock_timestamp() - interval '{LONG_OPEN}' LIMIT 1;
    IF writer IS NOT NULL THEN
        RAISE EXCEPTION 'a transaction that has written records is still open, in process %. The table is partitioned '
            'once it has ended', writer USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
"""

# The index finds records that are kept forever; there is no entry for any other.
LAYOUT: Final = f"""
DO $onefold$
DECLARE
    home name; base name; kind "char"; there boolean; left_behind text; owned name; one record; writer integer;
BEGIN
    PERFORM set_config('lock_timeout', '{LAYOUT_WAIT}', true), pg_advisory_xact_lock({ALONE});
    {HOME}
    IF kind <> 'r' THEN
        RAISE EXCEPTION 'the table was partitioned by hand: partitions= needs one that is not'
            USING ERRCODE = 'feature_not_supported';
    END IF;
    IF EXISTS (SELECT FROM {OUR_TRIGGER} = '{TABLE}'::regclass) THEN
        RETURN;
    END IF;
    {REFUSED.strip()}
    {_INDEX_IS_THERE.strip()}
    {_NOBODY_WRITES.strip()}
    EXECUTE format('SELECT EXISTS (SELECT FROM ONLY %I.%I)', home, base) INTO there;
    IF NOT there THEN
        {WITH_PAGES}
    END IF;
    EXECUTE format('CREATE INDEX IF NOT EXISTS {KEPT_INDEX} ON %I.%I (due) WHERE due IS NULL', home, base);
    EXECUTE format('CREATE TABLE IF NOT EXISTS %1$I.{SEALED} () INHERITS (%1$I.%2$I)', home, base);
    EXECUTE format($function${_ONCE}$function$, home);
    EXECUTE format('REVOKE ALL ON FUNCTION %I.{FUNCTION}() FROM PUBLIC', home);
    SELECT pg_get_userbyid(relowner) INTO owned FROM pg_class WHERE oid = '{TABLE}'::regclass;
    {owned_by(f"format('%I.{SEALED}', home)", "owned")}
    IF owned <> current_user THEN
        EXECUTE format('ALTER FUNCTION %I.{FUNCTION}() OWNER TO %I', home, owned);
    END IF;
    {WITH_TRIGGER}
END $onefold$
"""
