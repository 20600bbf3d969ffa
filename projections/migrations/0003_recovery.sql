-- What the recovery of a shard in Redis reads and writes.

-- Few events of many are needed: those of offers that are still there. (Equal offers share their entries: about 6 bytes an event.)
CREATE INDEX audit_1_offer ON audit_1 (offer);
CREATE INDEX audit_1_life ON audit_1 (shard, offer) WHERE type IN ('offer.opened', 'offer.retired');

CREATE TABLE recoveries (
    shard integer NOT NULL,
    term bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    kind text NOT NULL CHECK (kind IN ('behind', 'other')),
    problem text NOT NULL,
    redis_seq bigint NOT NULL,
    journal_seq bigint NOT NULL,
    snapshot_seq bigint NOT NULL,
    applied bigint NOT NULL,
    seconds double precision NOT NULL,
    PRIMARY KEY (shard, term)
);

-- Decisions that a recovery took back: answered as `decided` at most, never journaled. Told by the relay, which found their events in
-- Redis, or by a gate, which had given the answer.
CREATE TABLE lost_decisions (
    shard integer NOT NULL,
    seq bigint NOT NULL,
    told_by text NOT NULL,
    command text NOT NULL,
    offer text NOT NULL,
    user_id text,
    outcome text NOT NULL,
    amount bigint,
    body text,
    at timestamptz NOT NULL DEFAULT now()
);
