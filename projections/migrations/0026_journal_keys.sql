-- The public keys with which relays have signed records of a journal, so that a relay that lacks one of them
-- notices before it takes a shard: what that key signed would not count for it. A relay writes the row of its
-- own key before it signs anything.
CREATE TABLE journal_keys (
    -- Kafka's id of the journal topic, as in `system`.
    journal text NOT NULL,
    key_id text NOT NULL,
    -- Ed25519, in base64.
    public_key text NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (journal, key_id)
);
