-- A line of the audit trail may be a run of grabs, which takes several seqs: in every version there is, in place.
DO $$
DECLARE
    model record;
    main text := current_schema();
BEGIN
    FOR model IN SELECT schema, state FROM read_models WHERE projection = 'audit' AND state <> 'discarded' LOOP
        -- A version whose tables were dropped by hand is rebuilt.
        CONTINUE WHEN to_regclass(format('%I.audit_1', model.schema)) IS NULL;
        EXECUTE format('ALTER TABLE %I.audit_1 ADD COLUMN IF NOT EXISTS seqs integer NOT NULL DEFAULT 1', model.schema);
        -- A version that is being loaded gets its views in the end.
        CONTINUE WHEN to_regclass(format('%I.audit', model.schema)) IS NULL;
        EXECUTE format('CREATE OR REPLACE VIEW %I.audit AS SELECT shard, seq, offer, type, at, body, hash, seqs FROM %I.audit_1',
            model.schema, model.schema);
        IF model.state = 'live' THEN
            EXECUTE format('CREATE OR REPLACE VIEW %I.audit AS SELECT shard, seq, offer, type, at, body, hash, seqs FROM %I.audit',
                main, model.schema);
        END IF;
    END LOOP;
END $$;
