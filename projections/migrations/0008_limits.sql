-- A limit counts the grabs since it was added, and one of a campaign in the zone of the campaign's first offer: the views of every version
-- there is, in place. What rows need for it is written from now on; what was amended before counts as it did until a rebuild.

DO $$
DECLARE
    model record;
    path text := current_setting('search_path');
BEGIN
    FOR model IN SELECT schema FROM read_models WHERE projection = 'balances' AND state <> 'discarded' LOOP
        -- A version that is being loaded gets its views in the end.
        CONTINUE WHEN to_regclass(format('%I.limits', model.schema)) IS NULL;
        PERFORM set_config('search_path', quote_ident(model.schema), true);
        EXECUTE $view$
CREATE OR REPLACE VIEW offers AS
    SELECT offer, shard, kind, issuer, funding, asset, total, units, title, state, opened_at, opens_at, closes_at, closed_at, retired_at,
           reason, grabs, given, held, waiting, units_left, total - given - held - refunded AS amount_left, refunded, seed_sha256, seed,
           terms - 'limits_since' - 'campaign_zone' AS terms
    FROM offers_1
        $view$;
        EXECUTE $view$
CREATE OR REPLACE VIEW limits AS
    WITH begun AS (
        SELECT offer, shard, kind, retired_at, opened_at, terms, hour_shift_ms, split_part(offer, ':', 1) AS campaign,
               CASE WHEN max(coalesce(retired_at, 9223372036854775807)) OVER (
                        PARTITION BY shard, split_part(offer, ':', 1) ORDER BY opened_at, offer
                        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
                    ) >= opened_at THEN 0 ELSE 1 END AS begins
        FROM offers_1
    ), lives AS (
        SELECT *, sum(begins) OVER (PARTITION BY shard, campaign ORDER BY opened_at, offer) AS life FROM begun
    ), amended AS (
        SELECT l.offer, e.seq, lead(e.seq, 1, 9223372036854775807) OVER (PARTITION BY l.offer ORDER BY e.seq) AS until, e.limits
        FROM lives AS l, jsonb_to_recordset(coalesce(
            l.terms->'limits_since', jsonb_build_array(jsonb_build_object('seq', 0, 'limits', coalesce(l.terms->'limits', '[]')))
        )) AS e (seq bigint, limits jsonb)
        WHERE l.kind <> 'envelope'
    ), counting AS (
        SELECT a.offer, a.seq, a.until, x.by, x.per, x.max, coalesce(x.scope, 'offer') AS scope
        FROM amended AS a, jsonb_to_recordset(a.limits) AS x (by text, per text, max bigint, scope text)
    ), declared AS (
        SELECT l.offer, l.shard, l.campaign, l.life, c.by, c.per, c.max, c.scope,
               coalesce(CASE c.scope WHEN 'campaign' THEN l.terms->'campaign_zone'->>'timezone' END, l.terms->>'timezone', 'UTC') AS timezone,
               coalesce(CASE c.scope WHEN 'campaign' THEN (l.terms->'campaign_zone'->>'hour_shift_ms')::bigint END, l.hour_shift_ms)
                   AS hour_shift_ms
        FROM lives AS l JOIN counting AS c USING (offer)
        WHERE l.retired_at IS NULL AND c.until = 9223372036854775807
    ), counted AS (
        SELECT d.offer, d.by, d.per, d.max, d.scope,
               CASE WHEN d.by = 'user' THEN g.user_id ELSE g.attributes->>d.by END AS value,
               -- Who left the waiting list counts no more.
               CASE WHEN g.state = 'released' AND g.deadline_at IS NULL THEN 0 ELSE g.quantity - g.uncounted END AS units
        FROM declared AS d
        JOIN counting AS c ON (c.by, c.per, c.scope) = (d.by, d.per, d.scope)
        JOIN lives AS l ON l.offer = c.offer
            AND (l.offer = d.offer OR (d.scope = 'campaign' AND (l.shard, l.campaign, l.life) = (d.shard, d.campaign, d.life)))
        JOIN grabs_1 AS g ON g.offer = c.offer AND g.seq >= c.seq AND g.seq < c.until
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
    GROUP BY offer, by, per, scope, value, max
        $view$;
    END LOOP;
    PERFORM set_config('search_path', path, true);
END $$;
