-- Every version of a read model lives in a schema of its own, `<this schema>_<projection>_<number>`, with its tables, its views and its
-- cursors; the views of this schema, which are what people read, show those of the live version. What there is becomes version 1.

CREATE TABLE read_models (
    projection text NOT NULL,
    version integer NOT NULL,
    schema text NOT NULL UNIQUE,
    definition integer NOT NULL,
    -- building: not yet shown · live · previous: was live, kept for an instant return · discarded: about to be dropped
    state text NOT NULL CHECK (state IN ('building', 'live', 'previous', 'discarded')),
    -- What it was built from, and how far a build is: loading → following → agreed (compared, and free to be shown).
    source text NOT NULL DEFAULT 'journal' CHECK (source IN ('journal', 'audit')),
    phase text NOT NULL DEFAULT 'loading' CHECK (phase IN ('loading', 'following', 'agreed')),
    made_at timestamptz NOT NULL DEFAULT now(),
    shown_at timestamptz,
    PRIMARY KEY (projection, version)
);
CREATE UNIQUE INDEX read_models_state ON read_models (projection, state) WHERE state <> 'discarded';

DO $$
DECLARE
    main text := current_schema();
    home text;
    model record;
    name text;
    columns text;
BEGIN
    FOR model IN SELECT * FROM (VALUES
        ('ledger', ARRAY['transfers_1', 'accounts_1'], ARRAY['transfers', 'accounts']),
        ('balances', ARRAY['balances_1', 'grabs_1', 'offers_1', 'payments_1'],
            ARRAY['balances', 'grabs', 'offers', 'payments', 'waiting', 'limits']),
        ('audit', ARRAY['audit_1'], ARRAY['audit', 'operations']),
        ('events', ARRAY[]::text[], ARRAY[]::text[])
    ) AS known (projection, tables, views)
    LOOP
        home := format('%s_%s_1', main, model.projection);
        EXECUTE format('CREATE SCHEMA %I', home);
        INSERT INTO read_models (projection, version, schema, definition, state, phase, shown_at)
            VALUES (model.projection, 1, home, 1, 'live', 'agreed', now());
        FOREACH name IN ARRAY model.tables LOOP
            EXECUTE format('ALTER TABLE %I.%I SET SCHEMA %I', main, name, home);
        END LOOP;
        -- The views stay what they are for whoever depends on them, and read through those of the version.
        FOREACH name IN ARRAY model.views LOOP
            EXECUTE format('CREATE VIEW %I.%I AS %s', home, name, pg_get_viewdef(format('%I.%I', main, name)::regclass));
            SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) INTO columns FROM pg_attribute
                WHERE attrelid = format('%I.%I', home, name)::regclass AND attnum > 0;
            EXECUTE format('CREATE OR REPLACE VIEW %I.%I AS SELECT %s FROM %I.%I', main, name, columns, home, name);
        END LOOP;
        EXECUTE format('CREATE TABLE %I.projection_cursors (LIKE %I.projection_cursors INCLUDING ALL, frozen boolean NOT NULL DEFAULT false)',
            home, main);
        EXECUTE format('CREATE TABLE %I.stopped_shards (LIKE %I.stopped_shards INCLUDING ALL)', home, main);
        EXECUTE format('INSERT INTO %I.projection_cursors SELECT *, false FROM %I.projection_cursors WHERE projection = %L',
            home, main, model.projection);
        EXECUTE format('INSERT INTO %I.stopped_shards SELECT * FROM %I.stopped_shards WHERE projection = %L', home, main, model.projection);
    END LOOP;
    SELECT string_agg(format('SELECT projection, shard, seq, head, next_offset, term, owner FROM %I.projection_cursors', schema), ' UNION ALL ')
        INTO columns FROM read_models;
    EXECUTE 'CREATE OR REPLACE VIEW cursors AS ' || columns;
END $$;

DROP TABLE projection_cursors, stopped_shards;
