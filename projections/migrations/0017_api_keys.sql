-- API keys of the services that call the gateway. This table is no projection: no event has its rows, so no rebuild touches it, and only a
-- backup brings it back. Of a secret it has the SHA-256 alone.
CREATE TABLE api_keys (
    -- A name is never used for another key, also when its key is revoked: logs name keys by it.
    name text PRIMARY KEY,
    scopes text[] NOT NULL CHECK (cardinality(scopes) > 0),
    sha256 bytea NOT NULL UNIQUE CHECK (octet_length(sha256) = 32),
    -- The secret before the last rotation, and until when it is valid beside the new one.
    previous_sha256 bytea UNIQUE CHECK (octet_length(previous_sha256) = 32),
    previous_until timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    rotated_at timestamptz,
    -- Absent: the key does not expire.
    expires_at timestamptz,
    revoked_at timestamptz,
    CHECK ((previous_sha256 IS NULL) = (previous_until IS NULL))
);
