-- Balances of users, and the current state of offers, grabs and payments.
--- definition 1

--- part tables

-- Balances of users are sums over all offers and corrections. They have no bound, so they are wider than
-- bigint. Every amount of one event, grab, offer or payment is at most 10^13 and a bigint: an offer never
-- gives, holds or has left more than its `total`; a grab is paid at most its `due`, since returned units are
-- not paid again; a limit counts up to its `max`.
CREATE TABLE balances_1 (
    user_id text NOT NULL,
    asset text NOT NULL,
    available numeric(38, 0) NOT NULL DEFAULT 0,
    held numeric(38, 0) NOT NULL DEFAULT 0
);

-- Of the units of a grab (`quantity`), `held` wait to be confirmed, and `back` were returned or are still
-- waited for; the rest is the user's. Limits count `quantity - uncounted` of them at the time `at`. Units
-- that late payments took again are in `recounted`, a list of [minute as ms since 1970 UTC, units]: limits
-- count these at that minute (every window begins at a full minute). Returned units are subtracted from the
-- newest entries first. `state` is that of the newest event; the view computes the state of the grab from it.
-- The id of a grab belongs to its user: two users may have grabs with one id of an envelope, but not of
-- pieces.
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
    held bigint NOT NULL DEFAULT 0,
    back bigint NOT NULL DEFAULT 0,
    redeemed bigint NOT NULL DEFAULT 0,
    uncounted bigint NOT NULL DEFAULT 0,
    recounted jsonb,
    deadline_at bigint,
    due bigint,
    currency text,
    paid bigint NOT NULL DEFAULT 0,
    refunded bigint NOT NULL DEFAULT 0,
    attributes jsonb,
    basket text,
    metadata jsonb
);

-- There are few offers and payments compared with grabs, so a build updates them by their keys. `terms` also
-- has what the view `limits` needs: `limits_since` (if limits were amended: all limits, with the seq from
-- which they count), and `campaign_zone` (if limits of the campaign count in another zone than the offer's).
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
    held bigint NOT NULL DEFAULT 0,
    waiting bigint NOT NULL DEFAULT 0,
    hour_shift_ms bigint NOT NULL DEFAULT 0,
    retired_at bigint,
    opened_seq bigint NOT NULL,
    retired_seq bigint
);

-- One row for each booking of a payment. The id of a payment may be used again after its campaign has
-- forgotten it.
CREATE TABLE payments_1 (
    campaign text NOT NULL,
    payment text NOT NULL,
    offer text NOT NULL,
    grab text NOT NULL,
    amount bigint NOT NULL,
    currency text NOT NULL,
    state text NOT NULL,
    outcome text NOT NULL,
    refunded bigint NOT NULL DEFAULT 0,
    shard integer NOT NULL,
    seq bigint NOT NULL,
    at bigint NOT NULL,
    PRIMARY KEY (shard, seq)
);
CREATE INDEX payments_1_payment ON payments_1 (campaign, payment);

--- part staging

-- Changes of users' balances, one row for each load; `finish` adds them up.
CREATE TABLE balance_changes (
    user_id text NOT NULL,
    asset text NOT NULL,
    available numeric(38, 0) NOT NULL,
    held numeric(38, 0) NOT NULL
);

-- The changes of a grab by each event: sums to add, and replaced columns (NULL: unchanged).
CREATE TABLE grab_changes (
    offer text NOT NULL,
    grab text NOT NULL,
    user_id text NOT NULL,
    seq bigint NOT NULL,
    held bigint NOT NULL,
    back bigint NOT NULL,
    redeemed bigint NOT NULL,
    uncounted bigint NOT NULL,
    paid bigint NOT NULL,
    refunded bigint NOT NULL,
    state text,
    quantity bigint,
    place bigint,
    recounted jsonb,
    deadline_at bigint,
    due bigint,
    currency text
);

--- part constraints

ALTER TABLE balances_1
    ADD PRIMARY KEY (user_id, asset),
    ADD CHECK (available >= 0),
    ADD CHECK (held >= 0);

ALTER TABLE grabs_1
    ADD PRIMARY KEY (offer, grab, user_id),
    ADD CHECK (held >= 0),
    ADD CHECK (back >= 0),
    ADD CHECK (redeemed >= 0),
    ADD CHECK (uncounted >= 0),
    ADD CHECK (held + back + redeemed <= quantity);
CREATE INDEX grabs_1_user ON grabs_1 (user_id);
-- Pages of who got what, of the luckiest, and of a waiting list, in their order. The luckiest of pieces got
-- more than one, so offers that give each user one are not in that index. The columns hardly ever change, so
-- that holds and payments need no new entries.
CREATE INDEX grabs_1_place ON grabs_1 (offer, place) WHERE state <> 'waiting';
CREATE INDEX grabs_1_luckiest ON grabs_1 (offer, (-amount), place)
    WHERE state <> 'waiting' AND (strpos(asset, ':') = 0 OR amount > 1);
CREATE INDEX grabs_1_waiting ON grabs_1 (offer, place) WHERE state = 'waiting';

-- Pages of offers, the newest first.
CREATE INDEX offers_1_newest ON offers_1 (opened_at, offer);
ALTER TABLE offers_1
    ADD CHECK (held >= 0),
    ADD CHECK (waiting >= 0),
    ADD CHECK (given + held + refunded <= total);

ALTER TABLE payments_1
    ADD CHECK (state IN ('served', 'refund_due')),
    ADD CHECK (refunded >= 0 AND refunded <= amount);

--- part views

-- `grabstream init` replaces these views in place when their text changes (projections/versions.py). So
-- columns are only added at the end; any other change needs another number of the definition. Each `…_time`
-- is the integer column next to it, as timestamptz.

-- A time zone, or UTC where this PostgreSQL does not know it: it may have an older list of zones than the
-- program that opened the offer, and one such offer must not break the views for all others.
CREATE OR REPLACE FUNCTION known_zone(zone text) RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF zone <> 'UTC' THEN
        PERFORM now() AT TIME ZONE zone;
    END IF;
    RETURN zone;
EXCEPTION WHEN invalid_parameter_value THEN
    RETURN 'UTC';
END $$;

CREATE OR REPLACE VIEW balances AS SELECT user_id, asset, available, held FROM balances_1;
CREATE OR REPLACE VIEW offers AS
    SELECT offer, shard, kind, issuer, funding, asset, total, units, title, state, opened_at, opens_at,
           closes_at, closed_at, retired_at, reason, grabs, given, held, waiting, units_left,
           total - given - held - refunded AS amount_left, refunded, seed_sha256, seed,
           terms - 'limits_since' - 'campaign_zone' AS terms,
           to_timestamp(opened_at::float8 / 1000) AS opened_time,
           to_timestamp(opens_at::float8 / 1000) AS opens_time,
           -- The last time that an offer may have (2100) stands for "does not close".
           to_timestamp(nullif(closes_at, 4102444800000)::float8 / 1000) AS closes_time,
           to_timestamp(closed_at::float8 / 1000) AS closed_time,
           to_timestamp(retired_at::float8 / 1000) AS retired_time,
           split_part(offer, ':', 1) AS campaign,
           coalesce(terms->'campaign_zone'->>'timezone', terms->>'timezone', 'UTC') AS campaign_timezone,
           -- What counts money is NULL for pieces. `units` of an envelope are its parts.
           CASE kind WHEN 'envelope' THEN total END AS total_amount,
           CASE kind WHEN 'envelope' THEN given END AS given_amount,
           CASE kind WHEN 'envelope' THEN total - given - held - refunded END AS left_amount,
           CASE kind WHEN 'envelope' THEN refunded END AS refunded_amount,
           CASE kind WHEN 'envelope' THEN grabs ELSE given END AS given_units,
           CASE WHEN kind <> 'envelope' THEN refunded WHEN closed_at IS NULL THEN 0 ELSE units - grabs END
               AS refunded_units,
           known_zone(coalesce(terms->'campaign_zone'->>'timezone', terms->>'timezone', 'UTC')) AS known_timezone
    FROM offers_1;
CREATE OR REPLACE VIEW grabs AS
    SELECT offer, grab, user_id,
           CASE WHEN held > 0 THEN 'held'
                WHEN state = 'waiting' THEN state
                WHEN quantity > back AND deadline_at IS NOT NULL THEN 'confirmed'
                WHEN quantity > back THEN 'granted'
                ELSE state
           END AS state,
           quantity, amount, asset, place, shard, seq, at,
           held, quantity - held - back AS taken, redeemed, back, deadline_at, due, currency, paid, refunded,
           attributes, basket, metadata,
           to_timestamp(at::float8 / 1000) AS at_time, to_timestamp(deadline_at::float8 / 1000) AS deadline_time,
           -- Only assets that are pieces have a colon in their names.
           CASE WHEN strpos(asset, ':') = 0 THEN amount END AS part_amount,
           -- As the column `state` says, in a form that the indexes have.
           state = 'waiting' AS is_waiting
    FROM grabs_1;
CREATE OR REPLACE VIEW payments AS
    SELECT payment, offer, grab, amount, currency, state, outcome, refunded, shard, seq, at,
           to_timestamp(at::float8 / 1000) AS at_time
    FROM payments_1;

-- The waiting lists of open offers; position 1 is served next.
CREATE OR REPLACE VIEW waiting AS
    SELECT g.offer, g.grab, g.user_id, g.quantity, g.at,
           row_number() OVER (PARTITION BY g.offer ORDER BY g.place) AS position,
           to_timestamp(g.at::float8 / 1000) AS at_time
    FROM grabs_1 AS g JOIN offers_1 AS o USING (offer)
    WHERE g.state = 'waiting' AND o.closed_at IS NULL;

-- What each limit leaves to each user, or value of an attribute, in the current window, and until when. A
-- limit counts grabs since it was added. A limit of a campaign counts the grabs of all its offers since the
-- campaign began (after all its earlier offers had retired), in the zone of its first offer. Events are
-- ordered by seq, since the time of a shard may stand still.
CREATE OR REPLACE VIEW limits AS
    WITH begun AS (
        SELECT offer, shard, kind, retired_at, opened_seq, terms, hour_shift_ms,
               split_part(offer, ':', 1) AS campaign,
               CASE WHEN max(coalesce(retired_seq, 9223372036854775807)) OVER (
                        PARTITION BY shard, split_part(offer, ':', 1) ORDER BY opened_seq
                        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
                    ) > opened_seq THEN 0 ELSE 1 END AS begins
        FROM offers_1
    ), lives AS (
        SELECT *, sum(begins) OVER (PARTITION BY shard, campaign ORDER BY opened_seq) AS life FROM begun
    ), amended AS (
        SELECT l.offer, e.seq,
               lead(e.seq, 1, 9223372036854775807) OVER (PARTITION BY l.offer ORDER BY e.seq) AS until,
               e.limits
        FROM lives AS l, jsonb_to_recordset(coalesce(
            l.terms->'limits_since',
            jsonb_build_array(jsonb_build_object('seq', 0, 'limits', coalesce(l.terms->'limits', '[]')))
        )) AS e (seq bigint, limits jsonb)
        WHERE l.kind <> 'envelope'
    ), counting AS (
        SELECT a.offer, a.seq, a.until, x.by, x.per, x.max, coalesce(x.scope, 'offer') AS scope
        FROM amended AS a, jsonb_to_recordset(a.limits) AS x (by text, per text, max bigint, scope text)
    ), declared AS MATERIALIZED (
        -- Each zone is looked up once for a limit.
        SELECT l.offer, l.shard, l.campaign, l.life, c.by, c.per, c.max, c.scope,
               known_zone(coalesce(
                   CASE c.scope WHEN 'campaign' THEN l.terms->'campaign_zone'->>'timezone' END,
                   l.terms->>'timezone', 'UTC'
               )) AS timezone,
               coalesce(
                   CASE c.scope WHEN 'campaign' THEN (l.terms->'campaign_zone'->>'hour_shift_ms')::bigint END,
                   l.hour_shift_ms
               ) AS hour_shift_ms
        FROM lives AS l JOIN counting AS c USING (offer)
        WHERE l.retired_at IS NULL AND c.until = 9223372036854775807
    ), ending AS MATERIALIZED (
        -- Computed once for a limit, not for each grab that it counts.
        SELECT d.*, CASE d.per
            WHEN 'offer' THEN NULL
            WHEN 'hour' THEN (((extract(epoch FROM now()) * 1000)::bigint + d.hour_shift_ms) / 3600000 + 1) * 3600000
                - d.hour_shift_ms
            ELSE (
                -- Where the local clock is set back over midnight, PostgreSQL takes the second one.
                SELECT (extract(epoch FROM min(c.at)) * 1000)::bigint
                FROM (
                    SELECT date_trunc(d.per, now() AT TIME ZONE d.timezone) + ('1 ' || d.per)::interval AS begins
                ) AS n CROSS JOIN LATERAL (
                    SELECT n.begins AT TIME ZONE d.timezone - i * interval '30 minutes' AS at
                    FROM generate_series(0, 4) AS i
                ) AS c
                WHERE c.at > now() AND c.at AT TIME ZONE d.timezone >= n.begins
            )
        END AS resets_at
        FROM declared AS d
    ), counted AS (
        SELECT d.offer, d.by, d.per, d.max, d.scope, d.resets_at,
               CASE WHEN d.by = 'user' THEN g.user_id ELSE g.attributes->>d.by END AS value, b.units
        FROM ending AS d
        JOIN counting AS c ON (c.by, c.per, c.scope) = (d.by, d.per, d.scope)
        JOIN lives AS l ON l.offer = c.offer
            AND (
                l.offer = d.offer
                OR (d.scope = 'campaign' AND (l.shard, l.campaign, l.life) = (d.shard, d.campaign, d.life))
            )
        JOIN grabs_1 AS g ON g.offer = c.offer AND g.seq >= c.seq AND g.seq < c.until
        CROSS JOIN LATERAL (
            -- Grabs that left the waiting list no longer count.
            SELECT g.at,
                   CASE WHEN g.state = 'released' AND g.deadline_at IS NULL THEN 0
                        ELSE g.quantity - g.uncounted END AS units
            UNION ALL SELECT (e->>0)::bigint, (e->>1)::bigint FROM jsonb_array_elements(g.recounted) AS e
        ) AS b
        WHERE CASE d.per
            WHEN 'offer' THEN true
            WHEN 'hour' THEN (b.at + d.hour_shift_ms) / 3600000
                = ((extract(epoch FROM now()) * 1000)::bigint + d.hour_shift_ms) / 3600000
            ELSE date_trunc(d.per, to_timestamp(b.at / 1000.0) AT TIME ZONE d.timezone)
                = date_trunc(d.per, now() AT TIME ZONE d.timezone)
        END
    )
    SELECT offer, by, per, scope, value, max, sum(units)::bigint AS counted,
           greatest(max - sum(units), 0)::bigint AS "left",
           resets_at, to_timestamp(resets_at::float8 / 1000) AS resets_time
    FROM counted WHERE value IS NOT NULL
    GROUP BY offer, by, per, scope, value, max, resets_at;

-- The amounts of parts by their place, over all envelopes of the same terms, next to the mean by the law for
-- every place: total ÷ parts.
CREATE OR REPLACE VIEW fairness AS
    SELECT o.asset, coalesce(o.terms->>'law', 'double_mean') AS law, o.total, o.units AS parts,
           coalesce((o.terms->>'min')::bigint, 1) AS min, (o.terms->>'max')::bigint AS max, g.place,
           count(*) AS grabs, avg(g.amount) AS amount_mean, o.total::numeric / o.units AS law_mean,
           avg(g.amount) - o.total::numeric / o.units AS difference,
           stddev_samp(g.amount) / sqrt(count(*)::numeric) AS standard_error,
           min(g.amount) AS amount_min, max(g.amount) AS amount_max
    FROM offers_1 AS o JOIN grabs_1 AS g USING (offer)
    WHERE o.kind = 'envelope'
    GROUP BY 1, 2, 3, 4, 5, 6, 7;
