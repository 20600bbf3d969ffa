-- Which system this schema belongs to: the prefix of its topics and keys, Kafka's own id of the journal's topic (another topic of that name
-- has another one), and the number of shards. `grabstream init` writes the row; every process compares it with its settings.
CREATE TABLE system (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    prefix text NOT NULL,
    journal text NOT NULL,
    shards integer NOT NULL CHECK (shards > 0),
    written_at timestamptz NOT NULL DEFAULT now()
);
