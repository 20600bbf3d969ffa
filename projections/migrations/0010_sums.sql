-- Sums over events without a bound are wider than bigint: the verifier's own here, those of ledger and balances in their definitions 2.
-- The verifier of the release before adds to it as it did. (Counts of events and refusals grow by one each: bigint holds them.)

ALTER TABLE verified_accounts ALTER COLUMN posted TYPE numeric(38, 0);
