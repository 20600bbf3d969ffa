-- Tables that every version of a read model has: its cursor in each shard, and the shards at which it
-- stopped. `frozen`: another version of the same definition is live, and workers write that version.

CREATE TABLE projection_cursors (
    projection text NOT NULL,
    shard integer NOT NULL,
    seq bigint NOT NULL DEFAULT 0,
    head bytea NOT NULL DEFAULT decode(repeat('00', 32), 'hex'),
    next_offset bigint NOT NULL DEFAULT 0,
    term bigint NOT NULL DEFAULT 0,
    owner text NOT NULL DEFAULT '',
    moved_at timestamptz NOT NULL DEFAULT now(),
    frozen boolean NOT NULL DEFAULT false,
    PRIMARY KEY (projection, shard)
);

CREATE TABLE stopped_shards (
    projection text NOT NULL,
    shard integer NOT NULL,
    seq bigint NOT NULL,
    journal_offset bigint NOT NULL,
    reason text NOT NULL,
    stopped_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (projection, shard)
);
