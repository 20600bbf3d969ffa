-- Webhooks: subscriptions to single events, how far each has read the journal, and what it has not delivered
-- yet. They are no read model: no rebuild touches them.

-- `types` and `offers` are what is subscribed to; empty: all. `from_ms` (ms since 1970 UTC) is the time from
-- which on. `reason` says why the system has paused it.
CREATE TABLE webhooks (
    webhook text PRIMARY KEY,
    url text NOT NULL,
    types text[] NOT NULL,
    offers text[] NOT NULL,
    sealed_secret text NOT NULL,
    state text NOT NULL DEFAULT 'active' CHECK (state IN ('active', 'paused')),
    reason text,
    from_ms bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    delivered bigint NOT NULL DEFAULT 0,
    delivered_at timestamptz
);

CREATE TABLE webhook_cursors (
    webhook text NOT NULL REFERENCES webhooks ON DELETE CASCADE,
    shard integer NOT NULL,
    seq bigint NOT NULL,
    head bytea NOT NULL,
    next_offset bigint NOT NULL,
    term bigint NOT NULL,
    owner text NOT NULL,
    PRIMARY KEY (webhook, shard)
);

-- What is not delivered yet; a delivered event is deleted. `body` is the text as on `grab.events`. `waiting`:
-- it is sent at `due_at`, after those of its offer with a lower seq. `parked`: an operator sends it again.
CREATE TABLE webhook_deliveries (
    webhook text NOT NULL REFERENCES webhooks ON DELETE CASCADE,
    shard integer NOT NULL,
    seq bigint NOT NULL,
    offer text NOT NULL,
    type text NOT NULL,
    at bigint NOT NULL,
    body text NOT NULL,
    state text NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'parked')),
    attempts integer NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL DEFAULT now(),
    status integer,
    problem text,
    PRIMARY KEY (webhook, shard, seq)
);
CREATE INDEX webhook_deliveries_waiting ON webhook_deliveries (webhook, offer, seq) WHERE state = 'waiting';
CREATE INDEX webhook_deliveries_parked ON webhook_deliveries (webhook, offer, seq) WHERE state = 'parked';
