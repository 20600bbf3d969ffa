-- The audit trail: every line of the journal, byte for byte, with the hash of the chain after it.
--- definition 1

--- part tables

-- A run of grabs is one line. It takes `seqs` seqs, of which `seq` is the first.
CREATE TABLE audit_1 (
    shard integer NOT NULL,
    seq bigint NOT NULL,
    offer text NOT NULL,
    type text NOT NULL,
    at bigint NOT NULL,
    body text NOT NULL,
    hash bytea NOT NULL,
    seqs integer NOT NULL DEFAULT 1
);
-- The default, pglz, takes longer for a run of more than 28 grabs than all else that PostgreSQL does for it.
DO $$ BEGIN
    ALTER TABLE audit_1 ALTER COLUMN body SET COMPRESSION lz4;
EXCEPTION WHEN feature_not_supported THEN
    RAISE NOTICE 'this server has no lz4: the audit trail is compressed with pglz';
END $$;

--- part constraints

ALTER TABLE audit_1 ADD PRIMARY KEY (shard, seq);
-- For the recovery of a shard in Redis, which needs few of the events: those of present offers, and those
-- about payments of retired offers. (Entries of the same offer share storage: about 6 bytes for each event.)
CREATE INDEX audit_1_offer ON audit_1 (offer);
CREATE INDEX audit_1_payments ON audit_1 (offer, seq) WHERE type IN ('grab.confirmed', 'payment.refund_due');
CREATE INDEX audit_1_life ON audit_1 (shard, offer) WHERE type IN ('offer.opened', 'offer.retired');

--- part views

-- Replaced in place by `grabstream init`: columns are only added at the end (see balances.sql).

CREATE OR REPLACE VIEW audit AS
    SELECT shard, seq, offer, type, at, body, hash, seqs, to_timestamp(at::float8 / 1000) AS at_time FROM audit_1;

-- Every event separately, as on `grab.events`: the grabs of a run one by one, in the form of version 1.
CREATE OR REPLACE VIEW events AS
    SELECT shard, seq, offer, type, at, body, to_timestamp(at::float8 / 1000) AS at_time FROM audit_1
    WHERE type NOT IN ('grab.granted', 'grab.held')
    UNION ALL
    SELECT line.shard, line.seq + n - 1, line.offer, line.type, line.at, concat(
        '{"type":"', line.type, '","v":1,"shard":', line.shard, ',"seq":', line.seq + n - 1,
        ',"offer_seq":', run.offer_seq + n - 1, ',"offer":"', line.offer, '","at":', line.at,
        ',"command":"', coalesce(run.command, grab), '","grab":"', grab, '","user":"', "user",
        '","quantity":', units, ',"amount":', coalesce(amount, units::text), ',"asset":"', run.asset,
        '","place":', run.place + n - 1, ',"left":', run."left" + later, ',"asked":' || one.asked,
        ',"deadline_at":' || run.deadline_at,
        CASE WHEN run.currency IS NOT NULL THEN ',"due":' || coalesce(run.price, 0) * units END,
        ',"currency":"' || run.currency || '"', CASE WHEN run.waited THEN ',"waited":true' END,
        ',"attributes":' || nullif(one.attributes::text, 'null'),
        ',"metadata":' || nullif(one.metadata::text, 'null'), ',"ticket":"' || (ticket->>0) || '"',
        ',"ticket_ends_at":' || (ticket->>1), ',"basket":"' || run.basket || '"',
        ',"codes":' || nullif(one.codes::text, '[]'),
        ',"digest":"' || coalesce(digest, CASE WHEN run.command IS NULL THEN 'plain' END) || '"', '}'
    ), to_timestamp(line.at::float8 / 1000)
    FROM audit_1 AS line,
        LATERAL json_to_record(line.body::json) AS run(
            offer_seq bigint, command text, asset text, place bigint, "left" bigint, basket text,
            deadline_at bigint, price bigint, currency text, waited boolean, grabs json, users json,
            quantities json, amounts json, asked json, attributes json, metadata json, tickets json,
            codes json, digests json
        ),
        LATERAL (
            SELECT grab, "user", amount, asked, attributes, metadata, ticket, codes, digest, n,
                   coalesce(quantity::bigint, 1) AS units,
                   sum(coalesce(quantity::bigint, 1)) OVER (ORDER BY n DESC)
                       - coalesce(quantity::bigint, 1) AS later
            FROM ROWS FROM (
                json_array_elements_text(run.grabs), json_array_elements_text(run.users),
                json_array_elements_text(run.quantities), json_array_elements_text(run.amounts),
                json_array_elements_text(run.asked), json_array_elements(run.attributes),
                json_array_elements(run.metadata), json_array_elements(run.tickets),
                json_array_elements(run.codes), json_array_elements_text(run.digests)
            ) WITH ORDINALITY
                AS columns(
                    grab, "user", quantity, amount, asked, attributes, metadata, ticket, codes, digest, n
                )
        ) AS one
    WHERE line.type IN ('grab.granted', 'grab.held');

-- The commands of operators that made events.
CREATE OR REPLACE VIEW operations AS
    SELECT shard, seq, offer, type, at, body::jsonb->>'operator' AS operator,
           body::jsonb->>'command' AS command, body,
           to_timestamp(at::float8 / 1000) AS at_time
    FROM audit_1
    WHERE type IN ('offer.opened', 'offer.loaded', 'offer.amended', 'offer.paused', 'offer.resumed',
                   'offer.closed', 'ledger.adjusted')
      -- Without closes by the system: by the last grab, or at the deadline.
      AND NOT (type = 'offer.closed' AND coalesce(body::jsonb->>'reason' IN ('drained', 'deadline'), false));
