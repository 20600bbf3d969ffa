-- The transfers of a user, from the views of the read models `ledger` and `balances`. Their names are
-- resolved when the function is called, so it depends on none of them, and a switch to another version does
-- not touch it. `grabstream init` replaces it when its text changes; other columns need a migration that
-- drops it first.
SET LOCAL check_function_bodies = off;
DO $definition$
BEGIN
    EXECUTE format($function$
CREATE OR REPLACE FUNCTION %1$I.user_transfers("user" text) RETURNS TABLE (
    shard integer, seq bigint, leg smallint, offer text, asset text, debit text, credit text, amount bigint,
    at bigint, at_time timestamptz
) LANGUAGE sql STABLE PARALLEL SAFE AS $body$
    SELECT shard, seq, leg, offer, asset, debit, credit, amount, at, at_time
    FROM %1$I.transfers_by_user WHERE user_id = $1
    UNION ALL
    -- A run has at most 1,000 grabs. Each is granted or held for the user in the seq of its first event.
    SELECT run.shard, grabbed.seq, 0::smallint, run.offer, run.asset, run.debit,
           run.credit_kind || grabbed.user_id, run.amounts[grabbed.seq - run.seq + 1], run.at,
           run.at_time
    FROM %1$I.grabs AS grabbed, LATERAL (
        SELECT * FROM %1$I.transfer_runs AS runs
        WHERE runs.shard = grabbed.shard AND runs.seq BETWEEN grabbed.seq - 999 AND grabbed.seq
        ORDER BY runs.seq DESC LIMIT 1
    ) AS run
    WHERE grabbed.user_id = $1 AND run.users[grabbed.seq - run.seq + 1] = grabbed.user_id
$body$
    $function$, current_schema());
    EXECUTE format('COMMENT ON FUNCTION %I.user_transfers IS %L', current_schema(),
        'The transfers from and to the accounts of a user (wallet:… and hold:…), as the view transfers has '
        'them, found by indexes. Those of a run of grabs are found by the grabs of the read model balances.');
END $definition$;
