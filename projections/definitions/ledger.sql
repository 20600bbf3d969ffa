-- The ledger: every transfer as a row, and the sum of every account.
--- definition 2

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

CREATE TABLE accounts_1 (
    account text NOT NULL,
    asset text NOT NULL,
    posted numeric(38, 0) NOT NULL
);

--- part constraints

ALTER TABLE transfers_1
    ADD PRIMARY KEY (shard, seq, leg),
    ADD CHECK (amount > 0),
    ADD CHECK (debit <> credit);

ALTER TABLE accounts_1
    ADD PRIMARY KEY (account, asset),
    ADD CONSTRAINT never_below_zero CHECK (
        posted >= 0
        OR NOT (
            account LIKE 'offer:%' OR account LIKE 'hold:%'
            OR account LIKE 'wallet:%' OR account LIKE 'redeemed:%'
        )
    );

--- part views

CREATE VIEW accounts AS SELECT account, asset, posted FROM accounts_1;
CREATE VIEW transfers AS SELECT shard, seq, leg, offer, asset, debit, credit, amount, at FROM transfers_1;
