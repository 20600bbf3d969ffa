-- The schema of a system: what is not computed from the journal. Read models are not here: each version of
-- one has its own schema, with the tables of its definition (projections/definitions/).
--
-- An integer time is in ms since 1970 UTC (`second`: in s), by the clock of a shard; a timestamptz is by the
-- clock of PostgreSQL.
--
-- When it is released, this file is not edited any more: databases have recorded it. A change is then another
-- file.

-- Read models are written with MERGE.
DO $$ BEGIN
    IF current_setting('server_version_num')::integer < 150000 THEN
        RAISE EXCEPTION 'grabstream needs PostgreSQL 15 or newer, this server is %', version();
    END IF;
END $$;

-- The system of this schema: the prefix of its topics and keys, the id that Kafka gave to the topic of the
-- journal (another topic of that name has another one), and the number of shards. `grabstream init` writes
-- the row; every process compares it with its settings.
CREATE TABLE system (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    prefix text NOT NULL,
    journal text NOT NULL,
    shards integer NOT NULL CHECK (shards > 0),
    written_at timestamptz NOT NULL DEFAULT now()
);

-- The names of outcomes, from models/outcomes.py.
CREATE TABLE outcomes (
    code integer PRIMARY KEY,
    name text NOT NULL UNIQUE
);

-- Versions of read models

-- A version lives in the schema `<this schema>_<projection>_<version>`. Views of this schema, which are what
-- people read, show the live versions (projections/versions.py).
CREATE TABLE read_models (
    projection text NOT NULL,
    version integer NOT NULL,
    schema text NOT NULL UNIQUE,
    definition integer NOT NULL,
    -- building: not shown yet; live; previous: was live, and is kept for an immediate return; discarded:
    -- about to be dropped.
    state text NOT NULL CHECK (state IN ('building', 'live', 'previous', 'discarded')),
    -- The source of the build, and its progress. agreed: it was compared, and may be shown.
    source text NOT NULL DEFAULT 'journal' CHECK (source IN ('journal', 'audit')),
    phase text NOT NULL DEFAULT 'loading' CHECK (phase IN ('loading', 'following', 'agreed')),
    made_at timestamptz NOT NULL DEFAULT now(),
    shown_at timestamptz,
    -- Whether it was built without the records that operators had set aside, instead of with them.
    skips_set_aside boolean NOT NULL DEFAULT false,
    PRIMARY KEY (projection, version)
);
CREATE UNIQUE INDEX read_models_state ON read_models (projection, state) WHERE state <> 'discarded';

-- The text of the views that each schema has: versions of read models, and this schema with its reports.
CREATE TABLE view_texts (
    schema text PRIMARY KEY,
    sha256 text NOT NULL
);

-- PostgreSQL would write through a view of one table into that table. Both triggers that call this function
-- (projections/reports.py) together refuse every INSERT, UPDATE and DELETE.
CREATE FUNCTION refuse_write() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'view % is read-only', TG_TABLE_NAME USING ERRCODE = 'object_not_in_prerequisite_state',
        HINT = 'Read models are computed from the journal; grabstream adjust books a correction.';
END $$;

-- Refusals, which are not events

-- All refusals, counted.
CREATE TABLE demand_1 (
    shard integer NOT NULL,
    second bigint NOT NULL,
    code integer NOT NULL,
    offer text NOT NULL,
    refusals bigint NOT NULL,
    PRIMARY KEY (shard, second, code, offer)
);
CREATE VIEW demand AS
    SELECT offer, outcomes.name AS outcome, code, second, sum(refusals)::bigint AS refusals,
           to_timestamp(second) AS second_time
    FROM demand_1 JOIN outcomes USING (code)
    GROUP BY offer, outcomes.name, code, second;

-- A sample of refusals, of bounded size: the newest.
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
    SELECT r.at, r.type, r.command, r.offer, r.user_id, r.grab, r.quantity, o.name AS outcome, r.code,
           r.retry_at, r.limit_name, r.limit_left, r.units_left, r.message,
           to_timestamp(r.at::float8 / 1000) AS at_time, to_timestamp(r.retry_at::float8 / 1000) AS retry_time
    FROM refusals_1 AS r JOIN outcomes AS o USING (code);

-- Recovery of shards in Redis

CREATE TABLE recoveries (
    shard integer NOT NULL,
    term bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    -- behind: Redis lacked events of the journal; other: it had another history.
    kind text NOT NULL CHECK (kind IN ('behind', 'other')),
    problem text NOT NULL,
    redis_seq bigint NOT NULL,
    journal_seq bigint NOT NULL,
    snapshot_seq bigint NOT NULL,
    applied bigint NOT NULL,
    seconds double precision NOT NULL,
    PRIMARY KEY (shard, term)
);

-- Decisions that a recovery revoked: at most answered as `decided`, never journaled. They are reported by the
-- relay, which found their events in Redis, or by a gate that had given the answer.
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

-- Records of the journal that operators set aside

-- A projection could not apply the record, and an operator let it continue after the record. Rows are never
-- deleted; they are in force while the version that lacks the events is live.
CREATE TABLE set_aside_records (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    projection text NOT NULL,
    read_model text NOT NULL,
    shard integer NOT NULL,
    journal_offset bigint NOT NULL,
    -- Its events. If `count` is 0, it has no event of the history, and `first_seq` is that of the next one.
    first_seq bigint NOT NULL,
    count bigint NOT NULL CHECK (count >= 0),
    -- The cursor after the record.
    head bytea NOT NULL,
    term bigint NOT NULL,
    owner text NOT NULL,
    -- The record as in the journal; headers as [[name, value in hex], …].
    headers jsonb NOT NULL,
    value bytea NOT NULL,
    value_sha256 bytea NOT NULL,
    -- The offers that its events are about. If not all events can be read, `readable` is false.
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
    SELECT id, projection, shard, journal_offset, first_seq, count, offers, readable, missing,
           refused_because, reason, operator, at, read_model,
           EXISTS (
               SELECT FROM read_models AS m WHERE m.schema = r.read_model AND m.state = 'live'
           ) AS in_force
    FROM set_aside_records AS r;

-- The verifier

-- Its position. Up to `seq`, with the hash `head`, the audit trail is chained, and the ledger was compared
-- with it line by line. `again_seq` and `again_head`: the position of the next round over the verified part.
-- None of them shows later changes.
CREATE TABLE verified (
    shard integer PRIMARY KEY,
    seq bigint NOT NULL DEFAULT 0,
    head bytea NOT NULL DEFAULT decode(repeat('00', 32), 'hex'),
    again_seq bigint NOT NULL DEFAULT 0,
    again_head bytea NOT NULL DEFAULT decode(repeat('00', 32), 'hex'),
    rounds bigint NOT NULL DEFAULT 0,
    -- The records of the shard that were set aside at the time. When that changes, all is verified again.
    gaps bigint[] NOT NULL DEFAULT '{}',
    verified_at timestamptz,
    compared_at timestamptz
);

-- What every account and offer must be at `verified.seq`, folded from the audit trail alone: independent of
-- the read models that it is compared with. A sum over all events has no bound, so it is wider than bigint.
CREATE TABLE verified_accounts (
    account text NOT NULL,
    asset text NOT NULL,
    posted numeric(38, 0) NOT NULL,
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

-- Differences. A row is open until a later pass over the same place finds nothing, or an operator dismisses
-- it.
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

-- Webhooks

-- Subscriptions to single events. `types` and `offers` are what is subscribed to (empty: all), from the time
-- `from_ms` (ms since 1970 UTC). `reason` says why the system has paused it.
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
    delivered bigint NOT NULL DEFAULT 0 CHECK (delivered BETWEEN 0 AND 1000000000000000),
    delivered_at timestamptz,
    -- The secret before the last rotation signs too, until then.
    previous_sealed_secret text,
    previous_until timestamptz
);

-- The position of each in the journal.
CREATE TABLE webhook_cursors (
    webhook text NOT NULL REFERENCES webhooks ON DELETE CASCADE,
    shard integer NOT NULL CHECK (shard >= 0),
    seq bigint NOT NULL CHECK (seq >= 0),
    head bytea NOT NULL CHECK (octet_length(head) = 32),
    next_offset bigint NOT NULL CHECK (next_offset >= 0),
    term bigint NOT NULL CHECK (term >= 0),
    owner text NOT NULL,
    PRIMARY KEY (webhook, shard)
);

-- Events that are not delivered yet; a delivered event is deleted. `body` is the text as on `grab.events`.
-- `waiting`: it is sent at `due_at`, after events of its offer with a lower seq. `parked`: an operator sends
-- it again. The checks refuse what could not be sent, or counted.
CREATE TABLE webhook_deliveries (
    webhook text NOT NULL REFERENCES webhooks ON DELETE CASCADE,
    shard integer NOT NULL CHECK (shard >= 0),
    seq bigint NOT NULL CHECK (seq > 0),
    offer text NOT NULL,
    type text NOT NULL,
    -- Up to the end of the year 9999.
    at bigint NOT NULL CHECK (at BETWEEN 0 AND 253402300799999),
    body text NOT NULL,
    state text NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'parked')),
    attempts integer NOT NULL DEFAULT 0 CHECK (attempts BETWEEN 0 AND 1000000),
    due_at timestamptz NOT NULL DEFAULT now(),
    status integer,
    problem text,
    PRIMARY KEY (webhook, shard, seq)
);
CREATE INDEX webhook_deliveries_waiting ON webhook_deliveries (webhook, offer, seq) WHERE state = 'waiting';
CREATE INDEX webhook_deliveries_parked ON webhook_deliveries (webhook, offer, seq) WHERE state = 'parked';

-- Keys. No event has these rows, so only a backup brings them back.

-- API keys of the services that call the gateway. Of a secret, only the SHA-256 is stored.
CREATE TABLE api_keys (
    -- A name is never used again, not even after its key was revoked: logs name keys by it.
    name text PRIMARY KEY,
    scopes text[] NOT NULL CHECK (cardinality(scopes) > 0),
    sha256 bytea NOT NULL UNIQUE CHECK (octet_length(sha256) = 32),
    -- The secret before the last rotation, and until when it is valid too.
    previous_sha256 bytea UNIQUE CHECK (octet_length(previous_sha256) = 32),
    previous_until timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    rotated_at timestamptz,
    -- NULL: the key does not expire.
    expires_at timestamptz,
    revoked_at timestamptz,
    CHECK ((previous_sha256 IS NULL) = (previous_until IS NULL))
);

-- The seal keys of the system, with which every process compares its own (connections/seal_keys.py). A
-- fingerprint is a keyed hash of a fixed text: it identifies its key, and the key cannot be computed from it.
-- `grabstream init` writes the rows.
CREATE TABLE seal_keys (
    key_id text PRIMARY KEY,
    fingerprint text NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    -- From then on, processes need not have the key.
    retired_at timestamptz
);

-- The public keys with which relays have signed records of a journal, so that a relay that lacks one of them
-- notices before it takes a shard: records that this key signed would not count for it. A relay writes the
-- row of its key before it signs.
CREATE TABLE journal_keys (
    -- The id that Kafka gave to the topic of the journal, as in `system`.
    journal text NOT NULL,
    key_id text NOT NULL,
    -- Ed25519, in base64.
    public_key text NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (journal, key_id)
);

-- A key for each user whose metadata events have sealed (docs/privacy.md). To delete a row is to delete the
-- metadata of its user in the journal, and in everything that was computed from it.
CREATE TABLE user_keys (
    user_id text PRIMARY KEY,
    -- 8 hex digits; a user who was forgotten gets another key with another name.
    key_name text NOT NULL,
    -- The key, sealed with a seal key.
    sealed_key text NOT NULL,
    made_at timestamptz NOT NULL DEFAULT now()
);

-- The users that `grabstream forget` was called for.
CREATE TABLE forgotten (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    by_name text NOT NULL,
    -- A keyed digest of the user id: computing it needs the id and a seal key, or its sealing part.
    user_digest text NOT NULL,
    -- Not the name of the key: events have that name and the id of the user.
    had_key boolean NOT NULL,
    refusals bigint NOT NULL
);
CREATE INDEX forgotten_digest ON forgotten (user_digest);
