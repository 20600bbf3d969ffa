"""What other people's programs can rely on, in their words: JSON Schemas, an AsyncAPI document, and what
changed since a release.
"""
