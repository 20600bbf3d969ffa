-- Sums over events without a bound are wider than bigint: the verifier's own here, those of ledger and balances in their definitions 2.
-- The verifier of the release before adds to it as it did. (Counts of events and refusals grow by one each: bigint holds them.)

ALTER TABLE verified_accounts ALTER COLUMN posted TYPE numeric(38, 0);

-- What operators did, in every version there is, in place: nothing of it is left out for words that its sender chose.
DO $$
DECLARE
    model record;
    path text := current_setting('search_path');
BEGIN
    FOR model IN SELECT schema FROM read_models WHERE projection = 'audit' AND state <> 'discarded' LOOP
        -- A version that is being loaded gets its views in the end.
        CONTINUE WHEN to_regclass(format('%I.operations', model.schema)) IS NULL;
        PERFORM set_config('search_path', quote_ident(model.schema), true);
        EXECUTE $view$
CREATE OR REPLACE VIEW operations AS
    SELECT shard, seq, offer, type, at, body::jsonb->>'operator' AS operator, body::jsonb->>'command' AS command, body
    FROM audit_1
    WHERE type IN ('offer.opened', 'offer.loaded', 'offer.amended', 'offer.paused', 'offer.resumed', 'offer.closed', 'ledger.adjusted')
      AND NOT (type = 'offer.closed' AND coalesce(body::jsonb->>'reason' IN ('drained', 'deadline'), false))
        $view$;
    END LOOP;
    PERFORM set_config('search_path', path, true);
END $$;
