-- Read models are written with MERGE, which PostgreSQL has since version 15.
DO $$ BEGIN
    IF current_setting('server_version_num')::integer < 150000 THEN
        RAISE EXCEPTION 'grabstream needs PostgreSQL 15 or newer, this server is %', version();
    END IF;
END $$;

-- Lines of the audit trail are compressed with lz4, where the server has it, in every version there is: runs of
-- more than 28 grabs took PostgreSQL longer to compress than all else that it does for their line. Rows that
-- are there stay as they are.
DO $$
DECLARE
    model record;
BEGIN
    FOR model IN SELECT schema FROM read_models WHERE projection = 'audit' AND state <> 'discarded' LOOP
        -- A version whose tables were dropped by hand is rebuilt.
        CONTINUE WHEN to_regclass(format('%I.audit_1', model.schema)) IS NULL;
        EXECUTE format('ALTER TABLE %I.audit_1 ALTER COLUMN body SET COMPRESSION lz4', model.schema);
    END LOOP;
EXCEPTION WHEN feature_not_supported THEN
    RAISE NOTICE 'this server has no lz4: the audit trail is compressed as before';
END $$;
