-- Views of DuckDB over an archive that `grabstream export archive` wrote. From the directory that has it:
--
--     duckdb -init grabstream.sql
--
-- Times are also timestamps (`at_time`), amounts are minor units or pieces. docs/archive.md explains the
-- columns.

CREATE OR REPLACE VIEW lines AS
SELECT * FROM read_parquet('archive/day=*/shard=*/*.parquet', hive_partitioning = true);

-- A row for each grab that got units, granted or held.
CREATE OR REPLACE VIEW grabs AS
SELECT shard, seq + i - 1 AS seq, type, offer, grabs[i] AS grab, users[i] AS user_id,
       quantities[i] AS quantity, amounts[i] AS amount, asset, place + i - 1 AS place, "at", at_time, day
FROM (
    SELECT *, unnest(range(1, seqs + 1)) AS i FROM lines WHERE type IN ('grab.granted', 'grab.held')
);

-- Money that confirmed units. What could not be served is an event of type `payment.refund_due`.
CREATE OR REPLACE VIEW payments AS
SELECT shard, seq, offer, grabs[1] AS grab, users[1] AS user_id, payment, paid, currency, "at", at_time, day
FROM lines WHERE type = 'grab.confirmed' AND paid > 0;

-- The last seq of each shard, the hash of the chain there, and the number of places where lines do not follow
-- each other, and of lines that are not what was journaled: both 0, or the archive is damaged. Each hash is
-- computed from the hash before and the line. A missing end shows only next to the view `cursors` of the
-- database.
CREATE OR REPLACE VIEW chain AS
SELECT shard, max(seq + seqs - 1) AS last_seq, arg_max(hash, seq) AS head,
       count(*) FILTER (seq <> coalesce(after, 0) + 1) AS gaps,
       count(*) FILTER (unhex(sha256(coalesce(hash_before, unhex(repeat('00', 32))) || encode(body))) <> hash)
           AS wrong_hashes
FROM (
    SELECT *, lag(seq + seqs - 1) OVER in_order AS after, lag(hash) OVER in_order AS hash_before
    FROM lines WINDOW in_order AS (PARTITION BY shard ORDER BY seq)
)
GROUP BY shard
ORDER BY shard;
