-- A payment's id may be used again when its campaign has forgotten it, so a row is named by its event. And the audit trail finds the
-- payments of offers that have retired, for the recovery of a shard. Both in place, in every version there is: programs of the release
-- before write the same rows.

DO $$
DECLARE
    model record;
BEGIN
    FOR model IN SELECT schema FROM read_models WHERE projection = 'balances' AND state <> 'discarded' LOOP
        EXECUTE format('ALTER TABLE %I.payments_1 DROP CONSTRAINT payments_1_pkey, ADD PRIMARY KEY (shard, seq)', model.schema);
        EXECUTE format('CREATE INDEX payments_1_payment ON %I.payments_1 (campaign, payment)', model.schema);
    END LOOP;
    FOR model IN SELECT schema FROM read_models WHERE projection = 'audit' AND state <> 'discarded' LOOP
        -- A version that is being loaded gets its indexes in the end.
        IF to_regclass(format('%I.audit_1_offer', model.schema)) IS NOT NULL THEN
            EXECUTE format('CREATE INDEX audit_1_payments ON %I.audit_1 (offer, seq) '
                'WHERE type IN (''grab.confirmed'', ''payment.refund_due'')', model.schema);
        END IF;
    END LOOP;
END $$;
