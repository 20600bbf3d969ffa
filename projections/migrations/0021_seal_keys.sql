-- The seal keys of the system, so that every process can compare its own with them (`ops/connections/seal_keys.py`). A fingerprint is a keyed
-- hash of a fixed text: it identifies its key, and the key cannot be computed from it. `grabstream init` writes the rows.
CREATE TABLE seal_keys (
    key_id text PRIMARY KEY,
    fingerprint text NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    -- Since when processes need not have the key any more.
    retired_at timestamptz
);
