-- Rotation of the secret of a webhook: the secret before signs too, until its time.
ALTER TABLE webhooks ADD COLUMN previous_sealed_secret text;
ALTER TABLE webhooks ADD COLUMN previous_until timestamptz;
