-- Offers of pieces: holds, waiting lists, returns, redemption, payments, and what is left of each limit.

-- Of the units of a grab (`quantity`), `held` wait to be confirmed and `back` went back, or are waited for; the rest is the user's.
-- `uncounted` of them were taken off the limits again. `state` is the newest event's; the view makes of it how the grab stands.
ALTER TABLE grabs_1
    ADD COLUMN held bigint NOT NULL DEFAULT 0 CHECK (held >= 0),
    ADD COLUMN back bigint NOT NULL DEFAULT 0 CHECK (back >= 0),
    ADD COLUMN redeemed bigint NOT NULL DEFAULT 0 CHECK (redeemed >= 0),
    ADD COLUMN uncounted bigint NOT NULL DEFAULT 0 CHECK (uncounted >= 0),
    ADD COLUMN counted_at bigint,
    ADD COLUMN deadline_at bigint,
    ADD COLUMN due bigint,
    ADD COLUMN currency text,
    ADD COLUMN paid bigint NOT NULL DEFAULT 0,
    ADD COLUMN refunded bigint NOT NULL DEFAULT 0,
    ADD COLUMN attributes jsonb,
    ADD COLUMN basket text,
    ADD CHECK (held + back + redeemed <= quantity);
CREATE INDEX grabs_1_user ON grabs_1 (user_id);

ALTER TABLE offers_1
    ADD COLUMN held bigint NOT NULL DEFAULT 0 CHECK (held >= 0),
    ADD COLUMN waiting bigint NOT NULL DEFAULT 0 CHECK (waiting >= 0),
    ADD COLUMN hour_shift_ms bigint NOT NULL DEFAULT 0,
    ADD COLUMN retired_at bigint,
    DROP CONSTRAINT offers_1_check,
    ADD CHECK (given + held + refunded <= total);

CREATE TABLE payments_1 (
    campaign text NOT NULL,
    payment text NOT NULL,
    offer text NOT NULL,
    grab text NOT NULL,
    amount bigint NOT NULL,
    currency text NOT NULL,
    state text NOT NULL CHECK (state IN ('served', 'refund_due')),
    outcome text NOT NULL,
    refunded bigint NOT NULL DEFAULT 0 CHECK (refunded >= 0 AND refunded <= amount),
    shard integer NOT NULL,
    seq bigint NOT NULL,
    at bigint NOT NULL,
    PRIMARY KEY (campaign, payment)
);

DROP VIEW offers, grabs;
CREATE VIEW offers AS
    SELECT offer, shard, kind, issuer, funding, asset, total, units, title, state, opened_at, opens_at, closes_at, closed_at, retired_at,
           reason, grabs, given, held, waiting, units_left, total - given - held - refunded AS amount_left, refunded, seed_sha256, seed,
           terms
    FROM offers_1;
CREATE VIEW grabs AS
    SELECT offer, grab, user_id,
           CASE WHEN held > 0 THEN 'held'
                WHEN state = 'waiting' THEN state
                WHEN quantity > back AND deadline_at IS NOT NULL THEN 'confirmed'
                WHEN quantity > back THEN 'granted'
                ELSE state
           END AS state,
           quantity, amount, asset, place, shard, seq, at,
           held, quantity - held - back AS taken, redeemed, back, deadline_at, due, currency, paid, refunded, attributes, basket
    FROM grabs_1;
CREATE VIEW payments AS
    SELECT payment, offer, grab, amount, currency, state, outcome, refunded, shard, seq, at FROM payments_1;

-- The line of those who wait, the next first.
CREATE VIEW waiting AS
    SELECT g.offer, g.grab, g.user_id, g.quantity, g.at, row_number() OVER (PARTITION BY g.offer ORDER BY g.place) AS position
    FROM grabs_1 AS g JOIN offers_1 AS o USING (offer)
    WHERE g.state = 'waiting' AND o.closed_at IS NULL;

-- What each limit leaves to each user, or value of an attribute, in the window of now. A campaign's limit counts the grabs of all its
-- offers that have it.
CREATE VIEW limits AS
    WITH declared AS (
        SELECT o.offer, o.shard, split_part(o.offer, ':', 1) AS campaign, coalesce(o.terms->>'timezone', 'UTC') AS timezone,
               o.hour_shift_ms, l.by, l.per, l.max, coalesce(l.scope, 'offer') AS scope
        FROM offers_1 AS o, jsonb_to_recordset(o.terms->'limits') AS l (by text, per text, max bigint, scope text)
        WHERE o.kind <> 'envelope' AND o.retired_at IS NULL
    ), counted AS (
        SELECT d.offer, d.by, d.per, d.max, d.scope,
               CASE WHEN d.by = 'user' THEN g.user_id ELSE g.attributes->>d.by END AS value,
               -- Who left the waiting list counts no more.
               CASE WHEN g.state = 'released' AND g.deadline_at IS NULL THEN 0 ELSE g.quantity - g.uncounted END AS units
        FROM declared AS d
        JOIN declared AS of ON (of.by, of.per, of.scope) = (d.by, d.per, d.scope)
            AND (of.offer = d.offer OR (d.scope = 'campaign' AND (of.shard, of.campaign, of.timezone) = (d.shard, d.campaign, d.timezone)))
        JOIN grabs_1 AS g ON g.offer = of.offer
        WHERE CASE d.per
            WHEN 'offer' THEN true
            WHEN 'hour' THEN (coalesce(g.counted_at, g.at) + d.hour_shift_ms) / 3600000
                = ((extract(epoch FROM now()) * 1000)::bigint + d.hour_shift_ms) / 3600000
            ELSE date_trunc(d.per, to_timestamp(coalesce(g.counted_at, g.at) / 1000.0) AT TIME ZONE d.timezone)
                = date_trunc(d.per, now() AT TIME ZONE d.timezone)
        END
    )
    SELECT offer, by, per, scope, value, max, sum(units)::bigint AS counted, greatest(max - sum(units), 0)::bigint AS "left"
    FROM counted WHERE value IS NOT NULL
    GROUP BY offer, by, per, scope, value, max;

-- What operators did, in order; nothing is ever changed in it.
CREATE VIEW operations AS
    SELECT shard, seq, offer, type, at, body::jsonb->>'operator' AS operator, body::jsonb->>'command' AS command, body
    FROM audit_1
    WHERE type IN ('offer.opened', 'offer.loaded', 'offer.amended', 'offer.paused', 'offer.resumed', 'offer.closed', 'ledger.adjusted')
      AND body::jsonb->>'command' <> 'sweep' AND body::jsonb->>'reason' IS DISTINCT FROM 'drained';
