-- For people who ask in SQL: times as timestamptz beside the integers, and views that refuse writes. Views of
-- read models, and reports over several, are not written here: `grabstream init` replaces them when their text
-- changes (projections/versions.py, projections/reports.py).

-- The text of the views that each schema has: versions of read models, and this schema with its reports.
CREATE TABLE view_texts (
    schema text PRIMARY KEY,
    sha256 text NOT NULL
);

CREATE OR REPLACE VIEW demand AS
    SELECT offer, outcomes.name AS outcome, code, second, sum(refusals)::bigint AS refusals,
           to_timestamp(second) AS second_time
    FROM demand_1 JOIN outcomes USING (code)
    GROUP BY offer, outcomes.name, code, second;

CREATE OR REPLACE VIEW refusals AS
    SELECT r.at, r.type, r.command, r.offer, r.user_id, r.grab, r.quantity, o.name AS outcome, r.code,
           r.retry_at, r.limit_name, r.limit_left, r.units_left, r.message,
           to_timestamp(r.at::float8 / 1000) AS at_time, to_timestamp(r.retry_at::float8 / 1000) AS retry_time
    FROM refusals_1 AS r JOIN outcomes AS o USING (code);

-- PostgreSQL would write through a view of one table into that table. Both triggers together refuse every
-- INSERT, UPDATE and DELETE: that of the statement also if no row matches, and it fires only where one of
-- rows exists.
CREATE FUNCTION refuse_write() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'view % is read-only', TG_TABLE_NAME USING ERRCODE = 'object_not_in_prerequisite_state',
        HINT = 'Read models are computed from the journal; grabstream adjust books a correction.';
END $$;
