-- Diagnosis: what an operator set aside, what has been verified and what was found, and the refusals that were kept.

-- Journal records that a projection could not take in and an operator let it go past. The rows stay for ever; they are in force while
-- the version of the read model that lacks the events is live.
CREATE TABLE set_aside_records (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    projection text NOT NULL,
    read_model text NOT NULL,
    shard integer NOT NULL,
    journal_offset bigint NOT NULL,
    -- Its events; with count 0 it held none that belong to the history, and first_seq is the next one.
    first_seq bigint NOT NULL,
    count bigint NOT NULL CHECK (count >= 0),
    -- The cursor behind it.
    head bytea NOT NULL,
    term bigint NOT NULL,
    owner text NOT NULL,
    -- As it stands in the journal; headers as [[name, value in hex], …].
    headers jsonb NOT NULL,
    value bytea NOT NULL,
    value_sha256 bytea NOT NULL,
    -- Offers its events are about, as far as they can be read; `readable` is false when some cannot.
    offers text[] NOT NULL,
    readable boolean NOT NULL,
    -- What accounts lack for it, as far as its events can be read: [[account, asset, amount], …].
    missing jsonb NOT NULL,
    refused_because text NOT NULL,
    reason text NOT NULL,
    operator text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (read_model, shard, journal_offset)
);
CREATE VIEW set_aside AS
    SELECT id, projection, shard, journal_offset, first_seq, count, offers, readable, missing, refused_because, reason, operator, at, read_model,
           EXISTS (SELECT FROM read_models AS m WHERE m.schema = r.read_model AND m.state = 'live') AS in_force
    FROM set_aside_records AS r;

-- How far the verifier is. `seq`, `head`: the audit trail is chained, and the ledger compared with it line by line, up to here.
-- `again_seq`, `again_head`: how far the next round over what was verified before is. Neither says anything about what changed since.
CREATE TABLE verified (
    shard integer PRIMARY KEY,
    seq bigint NOT NULL DEFAULT 0,
    head bytea NOT NULL DEFAULT decode(repeat('00', 32), 'hex'),
    again_seq bigint NOT NULL DEFAULT 0,
    again_head bytea NOT NULL DEFAULT decode(repeat('00', 32), 'hex'),
    rounds bigint NOT NULL DEFAULT 0,
    -- What was set aside in the shard when this was verified: when that is taken back, all of it is verified anew.
    gaps bigint[] NOT NULL DEFAULT '{}',
    verified_at timestamptz,
    compared_at timestamptz
);
-- What every account and offer must be at `verified.seq`, folded from the audit trail alone: a second opinion on the books.
CREATE TABLE verified_accounts (
    account text NOT NULL,
    asset text NOT NULL,
    posted bigint NOT NULL,
    PRIMARY KEY (account, asset)
);
CREATE TABLE verified_offers (
    offer text PRIMARY KEY,
    shard integer NOT NULL,
    offer_seq bigint NOT NULL,
    seq bigint NOT NULL,
    amount_left bigint NOT NULL,
    units_left bigint NOT NULL,
    held bigint NOT NULL,
    grabs bigint NOT NULL,
    retired boolean NOT NULL
);

-- Differences. A row is open until a later pass over the same place finds nothing, or an operator has dismissed it.
CREATE TABLE findings (
    id bigint GENERATED ALWAYS AS IDENTITY,
    kind text NOT NULL,
    shard integer NOT NULL,
    subject text NOT NULL,
    seq bigint,
    what text NOT NULL,
    found_at timestamptz NOT NULL DEFAULT now(),
    seen_at timestamptz NOT NULL DEFAULT now(),
    cleared_at timestamptz,
    dismissed_by text,
    dismissed_because text,
    PRIMARY KEY (kind, shard, subject)
);
CREATE UNIQUE INDEX findings_id ON findings (id);

CREATE VIEW verification AS
    SELECT v.shard, v.seq, v.head, v.rounds, v.verified_at, v.compared_at,
           (SELECT count(*) FROM findings AS f WHERE f.shard = v.shard AND f.cleared_at IS NULL) AS findings
    FROM verified AS v;

-- Refusals, as far as they are kept: a bounded sample, the newest. `demand` has them all, counted.
CREATE TABLE refusals_1 (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at bigint NOT NULL,
    type text NOT NULL,
    command text NOT NULL,
    offer text NOT NULL,
    user_id text,
    grab text,
    quantity bigint,
    code integer NOT NULL,
    retry_at bigint,
    limit_name text,
    limit_left bigint,
    units_left bigint,
    message text
);
CREATE INDEX refusals_1_offer ON refusals_1 (offer, user_id);
CREATE INDEX refusals_1_grab ON refusals_1 (offer, grab) WHERE grab IS NOT NULL;
CREATE VIEW refusals AS
    SELECT r.at, r.type, r.command, r.offer, r.user_id, r.grab, r.quantity, o.name AS outcome, r.code, r.retry_at, r.limit_name,
           r.limit_left, r.units_left, r.message
    FROM refusals_1 AS r JOIN outcomes AS o USING (code);
