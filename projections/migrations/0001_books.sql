-- The first version of the read models. Tables carry a version; the views are what other people's programs read.

CREATE TABLE outcomes (
    code integer PRIMARY KEY,
    name text NOT NULL UNIQUE
);

CREATE TABLE projection_cursors (
    projection text NOT NULL,
    shard integer NOT NULL,
    seq bigint NOT NULL DEFAULT 0,
    head bytea NOT NULL DEFAULT decode(repeat('00', 32), 'hex'),
    next_offset bigint NOT NULL DEFAULT 0,
    term bigint NOT NULL DEFAULT 0,
    owner text NOT NULL DEFAULT '',
    moved_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (projection, shard)
);

CREATE TABLE stopped_shards (
    projection text NOT NULL,
    shard integer NOT NULL,
    seq bigint NOT NULL,
    journal_offset bigint NOT NULL,
    reason text NOT NULL,
    stopped_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (projection, shard)
);

-- Ledger

CREATE TABLE transfers_1 (
    shard integer NOT NULL,
    seq bigint NOT NULL,
    leg smallint NOT NULL,
    offer text NOT NULL,
    asset text NOT NULL,
    debit text NOT NULL,
    credit text NOT NULL,
    amount bigint NOT NULL CHECK (amount > 0),
    at bigint NOT NULL,
    PRIMARY KEY (shard, seq, leg),
    CHECK (debit <> credit)
);

CREATE TABLE accounts_1 (
    account text NOT NULL,
    asset text NOT NULL,
    posted bigint NOT NULL,
    PRIMARY KEY (account, asset),
    CONSTRAINT never_below_zero CHECK (
        posted >= 0
        OR NOT (account LIKE 'offer:%' OR account LIKE 'hold:%' OR account LIKE 'wallet:%' OR account LIKE 'redeemed:%')
    )
);

-- Balances: what users and offers look like now

CREATE TABLE balances_1 (
    user_id text NOT NULL,
    asset text NOT NULL,
    available bigint NOT NULL DEFAULT 0 CHECK (available >= 0),
    held bigint NOT NULL DEFAULT 0 CHECK (held >= 0),
    PRIMARY KEY (user_id, asset)
);

CREATE TABLE grabs_1 (
    offer text NOT NULL,
    grab text NOT NULL,
    user_id text NOT NULL,
    state text NOT NULL,
    quantity bigint NOT NULL,
    amount bigint NOT NULL,
    asset text NOT NULL,
    place bigint NOT NULL,
    shard integer NOT NULL,
    seq bigint NOT NULL,
    at bigint NOT NULL,
    PRIMARY KEY (offer, grab)
);

CREATE TABLE offers_1 (
    offer text PRIMARY KEY,
    shard integer NOT NULL,
    kind text NOT NULL,
    issuer text NOT NULL,
    funding text,
    asset text NOT NULL,
    total bigint NOT NULL,
    units bigint NOT NULL,
    title text NOT NULL,
    state text NOT NULL,
    opened_at bigint NOT NULL,
    opens_at bigint NOT NULL,
    closes_at bigint NOT NULL,
    closed_at bigint,
    reason text,
    grabs bigint NOT NULL DEFAULT 0,
    given bigint NOT NULL DEFAULT 0,
    units_left bigint NOT NULL,
    refunded bigint NOT NULL DEFAULT 0,
    seed_sha256 text,
    seed text,
    terms jsonb NOT NULL,
    CHECK (given + refunded <= total)
);

-- Audit: every event, byte for byte, with the chain's hash behind it

CREATE TABLE audit_1 (
    shard integer NOT NULL,
    seq bigint NOT NULL,
    offer text NOT NULL,
    type text NOT NULL,
    at bigint NOT NULL,
    body text NOT NULL,
    hash bytea NOT NULL,
    PRIMARY KEY (shard, seq)
);

-- Demand: refusals, which are no events

CREATE TABLE demand_1 (
    shard integer NOT NULL,
    second bigint NOT NULL,
    code integer NOT NULL,
    offer text NOT NULL,
    refusals bigint NOT NULL,
    PRIMARY KEY (shard, second, code, offer)
);

CREATE VIEW offers AS
    SELECT offer, shard, kind, issuer, funding, asset, total, units, title, state, opened_at, opens_at, closes_at, closed_at,
           reason, grabs, given, units_left, total - given - refunded AS amount_left, refunded, seed_sha256, seed, terms
    FROM offers_1;
CREATE VIEW grabs AS SELECT offer, grab, user_id, state, quantity, amount, asset, place, shard, seq, at FROM grabs_1;
CREATE VIEW accounts AS SELECT account, asset, posted FROM accounts_1;
CREATE VIEW transfers AS SELECT shard, seq, leg, offer, asset, debit, credit, amount, at FROM transfers_1;
CREATE VIEW balances AS SELECT user_id, asset, available, held FROM balances_1;
CREATE VIEW audit AS SELECT shard, seq, offer, type, at, body, hash FROM audit_1;
CREATE VIEW demand AS
    SELECT offer, outcomes.name AS outcome, code, second, sum(refusals)::bigint AS refusals
    FROM demand_1 JOIN outcomes USING (code)
    GROUP BY offer, outcomes.name, code, second;
CREATE VIEW cursors AS SELECT projection, shard, seq, head, next_offset, term, owner FROM projection_cursors;
