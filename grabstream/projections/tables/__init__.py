"""Tables that are not computed from events: refusals and their counts, recoveries, records set aside,
webhooks, API keys, and keys of seals, users and signatures.
"""
