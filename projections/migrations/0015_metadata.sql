-- Metadata of grabs: as a column of `grabs`, and in the texts of `events`. In every version there is, in place:
-- no earlier event has metadata, so the column is complete without a rebuild.
DO $migration$
DECLARE
    model record;
    columns text;
    main text := current_schema();
BEGIN
    -- Versions of other definitions have other columns; no program of this release writes them.
    FOR model IN SELECT schema, state FROM read_models
                 WHERE projection = 'balances' AND definition = 3 AND state <> 'discarded' LOOP
        -- A version whose tables were dropped by hand is rebuilt.
        CONTINUE WHEN to_regclass(format('%I.grabs_1', model.schema)) IS NULL;
        EXECUTE format('ALTER TABLE %I.grabs_1 ADD COLUMN IF NOT EXISTS metadata jsonb', model.schema);
        -- A version that is being loaded gets its views in the end.
        CONTINUE WHEN to_regclass(format('%I.grabs', model.schema)) IS NULL;
        EXECUTE format($view$
CREATE OR REPLACE VIEW %1$I.grabs AS
    SELECT offer, grab, user_id,
           CASE WHEN held > 0 THEN 'held'
                WHEN state = 'waiting' THEN state
                WHEN quantity > back AND deadline_at IS NOT NULL THEN 'confirmed'
                WHEN quantity > back THEN 'granted'
                ELSE state
           END AS state,
           quantity, amount, asset, place, shard, seq, at,
           held, quantity - held - back AS taken, redeemed, back, deadline_at, due, currency, paid, refunded,
           attributes, basket, metadata
    FROM %1$I.grabs_1
        $view$, model.schema);
        IF model.state = 'live' THEN
            SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) INTO columns
            FROM pg_attribute
            WHERE attrelid = format('%I.grabs', model.schema)::regclass AND attnum > 0;
            EXECUTE format('CREATE OR REPLACE VIEW %I.grabs AS SELECT %s FROM %I.grabs', main, columns,
                model.schema);
        END IF;
    END LOOP;
    FOR model IN SELECT schema FROM read_models WHERE projection = 'audit' AND state <> 'discarded' LOOP
        CONTINUE WHEN to_regclass(format('%I.events', model.schema)) IS NULL;
        EXECUTE format($view$
CREATE OR REPLACE VIEW %1$I.events AS
    SELECT shard, seq, offer, type, at, body FROM %1$I.audit_1
    WHERE NOT body LIKE '{"type":"grab.%%","v":2,%%'
    UNION ALL
    SELECT line.shard, line.seq + n - 1, line.offer, line.type, line.at, concat(
        '{"type":"', line.type, '","v":1,"shard":', line.shard, ',"seq":', line.seq + n - 1,
        ',"offer_seq":', run.offer_seq + n - 1, ',"offer":"', line.offer, '","at":', line.at,
        ',"command":"', coalesce(run.command, grab), '","grab":"', grab, '","user":"', "user",
        '","quantity":', units, ',"amount":', coalesce(amount, units::text), ',"asset":"', run.asset,
        '","place":', run.place + n - 1, ',"left":', run."left" + later, ',"asked":' || one.asked,
        ',"deadline_at":' || run.deadline_at,
        CASE WHEN run.currency IS NOT NULL THEN ',"due":' || coalesce(run.price, 0) * units END,
        ',"currency":"' || run.currency || '"', CASE WHEN run.waited THEN ',"waited":true' END,
        ',"attributes":' || nullif(one.attributes::text, 'null'),
        ',"metadata":' || nullif(one.metadata::text, 'null'), ',"ticket":"' || (ticket->>0) || '"',
        ',"ticket_ends_at":' || (ticket->>1), ',"basket":"' || run.basket || '"',
        ',"codes":' || nullif(one.codes::text, '[]'),
        ',"digest":"' || coalesce(digest, CASE WHEN run.command IS NULL THEN 'plain' END) || '"', '}'
    )
    FROM %1$I.audit_1 AS line,
        LATERAL json_to_record(line.body::json) AS run(
            offer_seq bigint, command text, asset text, place bigint, "left" bigint, basket text,
            deadline_at bigint, price bigint, currency text, waited boolean, grabs json, users json,
            quantities json, amounts json, asked json, attributes json, metadata json, tickets json,
            codes json, digests json
        ),
        LATERAL (
            SELECT grab, "user", amount, asked, attributes, metadata, ticket, codes, digest, n,
                   coalesce(quantity::bigint, 1) AS units,
                   sum(coalesce(quantity::bigint, 1)) OVER (ORDER BY n DESC)
                       - coalesce(quantity::bigint, 1) AS later
            FROM ROWS FROM (
                json_array_elements_text(run.grabs), json_array_elements_text(run.users),
                json_array_elements_text(run.quantities), json_array_elements_text(run.amounts),
                json_array_elements_text(run.asked), json_array_elements(run.attributes),
                json_array_elements(run.metadata), json_array_elements(run.tickets),
                json_array_elements(run.codes), json_array_elements_text(run.digests)
            ) WITH ORDINALITY
                AS columns(
                    grab, "user", quantity, amount, asked, attributes, metadata, ticket, codes, digest, n
                )
        ) AS one
    WHERE line.body LIKE '{"type":"grab.%%","v":2,%%'
        $view$, model.schema);
    END LOOP;
END $migration$;
