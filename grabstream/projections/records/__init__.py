"""Tables that are not computed from events: refusals, their counts, recoveries, and records set aside."""
