-- Views over several read models, in the schema of the system alone. They name the views of that schema, so a
-- switch to another version of a read model does not touch them. `grabstream init` replaces them when their
-- text changes; views of other programs stay as long as columns are only added at the end.
--
-- Every number of an offer is found by its keys (the indexes `grabs_1_pkey`, `audit_1_offer`,
-- `payments_1_pkey`), so a report of one week or offer costs what they have, however much else there is.

--- part reports

-- What became of each offer, by the ISO week in which it opens in the zone of its campaign (in UTC, and it
-- says so, where this PostgreSQL does not know that zone). Units are parts of an envelope, else pieces.
CREATE OR REPLACE VIEW results_by_week AS
    SELECT o.week, o.campaign, o.offer, o.title, o.kind, o.state, o.asset, o.terms->>'currency' AS currency,
           o.known_timezone AS timezone, o.opens_time, o.closed_time, o.units AS offered, o.grabs,
           g.granted, g.held, o.given_units + l.returned - g.granted AS confirmed, l.retaken,
           o.given_units + l.returned AS sold,
           g.held + l.retaken - (o.given_units + l.returned - g.granted) - o.held AS released, l.returned,
           o.given_units AS kept, o.held AS pending, o.waiting, o.given_amount,
           p.payments, g.paid, p.late_payments, p.late_served, p.late_paid, g.refunded, p.refund_due,
           g.paid - g.refunded AS revenue, to_timestamp(l.sold_out_at::float8 / 1000) AS sold_out_time,
           to_timestamp(l.sold_out_at::float8 / 1000) - o.opens_time AS sold_out_after
    FROM (
        SELECT *, to_char(opens_time AT TIME ZONE known_timezone, 'IYYY-"W"IW') AS week FROM offers
    ) AS o
    CROSS JOIN LATERAL (
        -- Grabs without a deadline that went back had waited, and got nothing.
        SELECT coalesce(sum(quantity) FILTER (
                   WHERE deadline_at IS NULL AND state NOT IN ('waiting', 'released', 'expired')
               ), 0) AS granted,
               coalesce(sum(quantity) FILTER (WHERE deadline_at IS NOT NULL), 0) AS held,
               coalesce(sum(paid), 0) AS paid, coalesce(sum(refunded), 0) AS refunded
        FROM grabs WHERE grabs.offer = o.offer
    ) AS g
    CROSS JOIN LATERAL (
        -- A field of a line cannot occur in its texts: their quotation marks are escaped.
        SELECT coalesce(sum(
                   CASE WHEN type = 'grab.returned' THEN (body::json->>'quantity')::bigint END
               ), 0) AS returned,
               coalesce(sum(
                   CASE WHEN type = 'grab.confirmed' AND strpos(body, ',"retaken":true') > 0
                        THEN (body::json->>'quantity')::bigint END
               ), 0) AS retaken,
               min(CASE WHEN type IN ('grab.granted', 'grab.held')
                            OR type = 'grab.confirmed' AND strpos(body, ',"retaken":true') > 0
                        THEN CASE WHEN strpos(body, ',"left":0,') > 0 OR strpos(body, ',"left":0}') > 0
                                  THEN at END
                   END) AS sold_out_at
        FROM audit
        WHERE audit.offer = o.offer AND type IN ('grab.granted', 'grab.held', 'grab.confirmed', 'grab.returned')
    ) AS l
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE m.state = 'served') AS payments,
               count(*) FILTER (WHERE m.at >= h.deadline_at) AS late_payments,
               count(*) FILTER (WHERE m.at >= h.deadline_at AND m.state = 'served') AS late_served,
               coalesce(sum(m.amount) FILTER (WHERE m.at >= h.deadline_at AND m.state = 'served'), 0)
                   AS late_paid,
               coalesce(sum(m.amount) FILTER (WHERE m.state = 'refund_due'), 0) AS refund_due
        -- `OFFSET 0` keeps the planner from reading the payments of all offers for those of one.
        FROM audit AS a
            CROSS JOIN LATERAL (
                SELECT * FROM payments WHERE payments.shard = a.shard AND payments.seq = a.seq OFFSET 0
            ) AS m
            LEFT JOIN grabs AS h ON (h.offer, h.grab) = (m.offer, m.grab)
        WHERE a.offer = o.offer AND a.type IN ('grab.confirmed', 'payment.refund_due')
    ) AS p;

-- Refusals of an offer by their reason.
CREATE OR REPLACE VIEW refusals_by_reason AS
    SELECT offer, outcome, sum(refusals)::bigint AS refusals, to_timestamp(min(second)) AS first_time,
           to_timestamp(max(second)) AS last_time
    FROM demand GROUP BY offer, outcome;

-- From attempts to what stayed: grabs, then units.
CREATE OR REPLACE VIEW funnel AS
    SELECT o.offer, o.campaign, o.kind, m.accepted + coalesce(r.grabs, 0)::bigint AS attempts,
           coalesce(r.grabs, 0)::bigint AS refused, m.accepted, o.waiting, o.granted, o.held, o.confirmed,
           o.retaken, o.released, o.returned, coalesce(r.by_reason, '{}') AS refusals
    FROM results_by_week AS o
    CROSS JOIN LATERAL (SELECT count(*) AS accepted FROM grabs WHERE grabs.offer = o.offer) AS m
    LEFT JOIN (
        SELECT offer, sum(refusals) FILTER (WHERE outcome IN (
                   'already_taken', 'not_open_yet', 'on_hold', 'over', 'not_eligible', 'limit_reached',
                   'sold_out', 'not_enough_left'
               )) AS grabs,
               jsonb_object_agg(outcome, refusals) AS by_reason
        FROM refusals_by_reason GROUP BY offer
    ) AS r USING (offer);
