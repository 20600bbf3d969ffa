-- Whether a version was built past what operators had set aside, instead of reading it again.

ALTER TABLE read_models ADD COLUMN keeps_set_aside boolean NOT NULL DEFAULT false;
