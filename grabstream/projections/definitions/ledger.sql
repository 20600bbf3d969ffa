-- The ledger: every transfer, and the sum of every account.
--- definition 1
--- compared transfers (shard, seq, leg): transfers_1 transfer_runs_1

--- part tables

-- The amount of a transfer is at most 10^13. `posted` is a sum of any number of transfers, and always an
-- integer.
CREATE TABLE transfers_1 (
    shard integer NOT NULL,
    seq bigint NOT NULL,
    leg smallint NOT NULL,
    offer text NOT NULL,
    asset text NOT NULL,
    debit text NOT NULL,
    credit text NOT NULL,
    amount bigint NOT NULL,
    at bigint NOT NULL
);

-- The transfers of a run of grabs, one for each user, from `debit` to `credit_kind || user`; `seq` is that of
-- the first, and each is the only one of its seq. There is no index by user: a grab that has not waited knows
-- the seq of its transfer. (Those that have waited do not, so their transfers are rows of `transfers_1`.) The
-- columns are not compressed: that would take longer than the rest of a row. Nor does ANALYZE count their
-- elements, which would take as long as loading them: no query searches for one.
CREATE TABLE transfer_runs_1 (
    shard integer NOT NULL,
    seq bigint NOT NULL,
    offer text NOT NULL,
    asset text NOT NULL,
    debit text NOT NULL,
    credit_kind text NOT NULL,
    users text[] NOT NULL,
    amounts bigint[] NOT NULL,
    at bigint NOT NULL
);
ALTER TABLE transfer_runs_1
    ALTER COLUMN users SET STORAGE EXTERNAL,
    ALTER COLUMN users SET STATISTICS 0,
    ALTER COLUMN amounts SET STORAGE EXTERNAL,
    ALTER COLUMN amounts SET STATISTICS 0;
-- A build has them while it loads, too: PostgreSQL waits for the next rows then, and rows are in the order of
-- the key.
ALTER TABLE transfer_runs_1
    ADD PRIMARY KEY (shard, seq),
    ADD CHECK (0 < ALL (amounts)),
    ADD CHECK (cardinality(users) = cardinality(amounts)),
    ADD CHECK (cardinality(users) BETWEEN 1 AND 1000),
    ADD CHECK (debit LIKE 'offer:%' AND credit_kind IN ('wallet:', 'hold:'));

CREATE TABLE accounts_1 (
    account text NOT NULL,
    asset text NOT NULL,
    posted numeric(38, 0) NOT NULL
);

--- part checks

ALTER TABLE accounts_1
    ADD CONSTRAINT never_below_zero CHECK (
        posted >= 0
        OR NOT (
            account LIKE 'offer:%' OR account LIKE 'hold:%'
            OR account LIKE 'wallet:%' OR account LIKE 'redeemed:%'
        )
    );

--- part constraints

ALTER TABLE transfers_1
    ADD PRIMARY KEY (shard, seq, leg),
    ADD CHECK (amount > 0),
    ADD CHECK (debit <> credit);
-- The user of each transfer, for `user_transfers`: of the account `wallet:…` or `hold:…` that it debits, else
-- credits. Few corrections move from one user to another; these have an entry in the second index, too.
CREATE INDEX transfers_1_user ON transfers_1 ((
    CASE WHEN debit LIKE 'wallet:%' THEN substr(debit, 8) WHEN debit LIKE 'hold:%' THEN substr(debit, 6)
         WHEN credit LIKE 'wallet:%' THEN substr(credit, 8) WHEN credit LIKE 'hold:%' THEN substr(credit, 6)
    END
));
CREATE INDEX transfers_1_other_user ON transfers_1 ((substr(credit, position(':' IN credit) + 1)))
    WHERE (debit LIKE 'wallet:%' OR debit LIKE 'hold:%') AND (credit LIKE 'wallet:%' OR credit LIKE 'hold:%')
        AND substr(debit, position(':' IN debit)) <> substr(credit, position(':' IN credit));

ALTER TABLE accounts_1 ADD PRIMARY KEY (account, asset);

--- part views

-- Replaced in place by `grabstream init`: columns are only added at the end (see balances.sql).

CREATE OR REPLACE VIEW accounts AS SELECT account, asset, posted FROM accounts_1;
-- `line_seq` is the seq of the line of the journal, and has an index: a search for a seq also needs `line_seq
-- BETWEEN seq - 999 AND seq`.
CREATE OR REPLACE VIEW transfers AS
    SELECT shard, seq, leg, offer, asset, debit, credit, amount, at, seq AS line_seq,
           to_timestamp(at::float8 / 1000) AS at_time
    FROM transfers_1
    UNION ALL
    SELECT shard, seq + n - 1, 0::smallint, offer, asset, debit, credit_kind || "user", amount, at, seq,
           to_timestamp(at::float8 / 1000)
    FROM transfer_runs_1, unnest(users, amounts) WITH ORDINALITY AS one("user", amount, n);

-- What `user_transfers` reads: transfers that are not in a run, by user (NULL if no account is a user's), and
-- runs.
CREATE OR REPLACE VIEW transfers_by_user AS
    SELECT CASE WHEN debit LIKE 'wallet:%' THEN substr(debit, 8) WHEN debit LIKE 'hold:%' THEN substr(debit, 6)
                WHEN credit LIKE 'wallet:%' THEN substr(credit, 8)
                WHEN credit LIKE 'hold:%' THEN substr(credit, 6)
           END AS user_id, shard, seq, leg, offer, asset, debit, credit, amount, at,
           to_timestamp(at::float8 / 1000) AS at_time
    FROM transfers_1
    UNION ALL
    SELECT substr(credit, position(':' IN credit) + 1), shard, seq, leg, offer, asset, debit, credit, amount,
           at, to_timestamp(at::float8 / 1000)
    FROM transfers_1
    WHERE (debit LIKE 'wallet:%' OR debit LIKE 'hold:%') AND (credit LIKE 'wallet:%' OR credit LIKE 'hold:%')
        AND substr(debit, position(':' IN debit)) <> substr(credit, position(':' IN credit));
CREATE OR REPLACE VIEW transfer_runs AS
    SELECT shard, seq, offer, asset, debit, credit_kind, users, amounts, at,
           to_timestamp(at::float8 / 1000) AS at_time
    FROM transfer_runs_1;

-- The sum of the transfers of an offer between each two kinds of accounts: what an account is named before
-- its first colon.
CREATE OR REPLACE VIEW flows AS
    SELECT offer, asset, debit_kind, credit_kind, sum(transfers)::bigint AS transfers, sum(amount) AS amount
    FROM (
        SELECT offer, asset, split_part(debit, ':', 1) AS debit_kind, split_part(credit, ':', 1) AS credit_kind,
               count(*) AS transfers, sum(amount) AS amount
        FROM transfers_1 GROUP BY 1, 2, 3, 4
        UNION ALL
        SELECT offer, asset, split_part(debit, ':', 1), rtrim(credit_kind, ':'), sum(cardinality(users)),
               sum((SELECT sum(one) FROM unnest(amounts) AS one))
        FROM transfer_runs_1 GROUP BY 1, 2, 3, 4
    ) AS both_forms
    GROUP BY 1, 2, 3, 4;

-- Money that was paid for units, and that is given back, by the minute. (No run moves such money.) The first
-- leg of a confirmation and of a return moves the units, from accounts that no correcting entry debits.
CREATE OR REPLACE VIEW revenue AS
    SELECT offer, asset AS currency, at - at % 60000 AS minute_at,
           count(*) FILTER (WHERE debit LIKE 'external:%') AS payments,
           coalesce(sum(amount) FILTER (WHERE debit LIKE 'external:%'), 0) AS paid,
           coalesce(sum(amount) FILTER (WHERE credit LIKE 'refund:%'), 0) AS refunded,
           coalesce(sum(amount) FILTER (WHERE debit LIKE 'external:%'), 0)
               - coalesce(sum(amount) FILTER (WHERE credit LIKE 'refund:%'), 0) AS revenue,
           to_timestamp((at - at % 60000)::float8 / 1000) AS minute_time
    FROM transfers_1 AS money
    WHERE ((debit LIKE 'external:%' AND credit LIKE 'issuer:%')
            OR (debit LIKE 'issuer:%' AND credit LIKE 'refund:%'))
        AND EXISTS (
            SELECT FROM transfers_1 AS units
            WHERE units.shard = money.shard AND units.seq = money.seq AND units.leg = 0
                AND split_part(units.debit, ':', 1) IN ('hold', 'offer', 'wallet')
        )
    GROUP BY offer, asset, at - at % 60000;
