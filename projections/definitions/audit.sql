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

--- part constraints

ALTER TABLE audit_1 ADD PRIMARY KEY (shard, seq);
-- For the recovery of a shard in Redis, which needs few of the events: those of present offers, and those
-- about payments of retired offers. (Entries of the same offer share storage: about 6 bytes for each event.)
CREATE INDEX audit_1_offer ON audit_1 (offer);
CREATE INDEX audit_1_payments ON audit_1 (offer, seq) WHERE type IN ('grab.confirmed', 'payment.refund_due');
CREATE INDEX audit_1_life ON audit_1 (shard, offer) WHERE type IN ('offer.opened', 'offer.retired');

--- part views

CREATE VIEW audit AS SELECT shard, seq, offer, type, at, body, hash, seqs FROM audit_1;

-- The commands of operators that made events.
CREATE VIEW operations AS
    SELECT shard, seq, offer, type, at, body::jsonb->>'operator' AS operator,
           body::jsonb->>'command' AS command, body
    FROM audit_1
    WHERE type IN ('offer.opened', 'offer.loaded', 'offer.amended', 'offer.paused', 'offer.resumed',
                   'offer.closed', 'ledger.adjusted')
      -- Without closes by the system: by the last grab, or at the deadline.
      AND NOT (type = 'offer.closed' AND coalesce(body::jsonb->>'reason' IN ('drained', 'deadline'), false));
