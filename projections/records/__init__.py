"""Tables that no event makes: refusals, their counts, recoveries, and records that were set aside."""
