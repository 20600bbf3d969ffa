-- Personal data: a key of each user whose metadata events have sealed, and what was forgotten
-- (`grabstream forget`, docs/privacy.md).

-- Who deletes a row deletes the metadata of its user in the journal and in everything that was made of it.
CREATE TABLE user_keys (
    user_id text PRIMARY KEY,
    -- 8 hex digits; a user who was forgotten gets another key with another name.
    key_name text NOT NULL,
    -- The key, sealed with a seal key.
    sealed_key text NOT NULL,
    made_at timestamptz NOT NULL DEFAULT now()
);

-- Who was forgotten, by a keyed digest of the user id, which only who has the id and a seal key, or its sealing
-- part, can compute.
CREATE TABLE forgotten (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    by_name text NOT NULL,
    user_digest text NOT NULL,
    -- Not its name, which events have beside the id of the user.
    had_key boolean NOT NULL,
    refusals bigint NOT NULL
);
CREATE INDEX forgotten_digest ON forgotten (user_digest);
