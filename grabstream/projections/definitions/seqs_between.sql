-- The seqs of a range of time in each shard, from the view `audit`. The clock of a shard never goes back, so
-- this is a binary search by its key: an index of the time would cost every grab more.
SET LOCAL check_function_bodies = off;
DO $definition$
BEGIN
    EXECUTE format($function$
CREATE OR REPLACE FUNCTION %1$I.seqs_between(since timestamptz, until timestamptz)
RETURNS TABLE (shard integer, first_seq bigint, last_seq bigint) LANGUAGE plpgsql STABLE ROWS 8 AS $body$
DECLARE
    times CONSTANT numeric[] := ARRAY[
        extract(epoch FROM coalesce($1, '-infinity')), extract(epoch FROM coalesce($2, 'infinity'))
    ];
    -- The first seq at each of the times, or later.
    found bigint[];
    low bigint;
    high bigint;
    middle bigint;
    line record;
BEGIN
    FOR shard IN
        SELECT of_audit.shard FROM %1$I.cursors AS of_audit WHERE of_audit.projection = 'audit' ORDER BY 1
    LOOP
        FOR i IN 1..2 LOOP
            SELECT a.seq INTO low FROM %1$I.audit AS a WHERE a.shard = seqs_between.shard
            ORDER BY a.seq LIMIT 1;
            SELECT a.seq + a.seqs INTO high FROM %1$I.audit AS a WHERE a.shard = seqs_between.shard
            ORDER BY a.seq DESC LIMIT 1;
            WHILE low < high LOOP
                middle := (low + high) / 2;
                SELECT a.seq, a.seqs, a.at INTO line FROM %1$I.audit AS a
                WHERE a.shard = seqs_between.shard AND a.seq <= middle ORDER BY a.seq DESC LIMIT 1;
                IF line.at < times[i] * 1000 THEN
                    -- After a line that was set aside, `middle` is in no line.
                    low := greatest(line.seq + line.seqs, middle + 1);
                ELSE
                    high := line.seq;
                END IF;
            END LOOP;
            found[i] := low;
        END LOOP;
        first_seq := found[1];
        last_seq := found[2] - 1;
        IF first_seq <= last_seq THEN
            RETURN NEXT;
        END IF;
    END LOOP;
END
$body$
    $function$, current_schema());
    EXECUTE format('COMMENT ON FUNCTION %I.seqs_between IS %L', current_schema(),
        'The first and the last seq of the events from a time on until before another one, by shard, as far '
        'as the audit trail is. NULL: without a bound. Shards without such events are left out.');
END $definition$;
