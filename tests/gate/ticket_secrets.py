"""Secrets that tests sign tickets with, and their text form in settings."""

from base64 import b64encode

SECRET, OTHER_SECRET = bytes(range(32)), bytes(range(1, 33))


def as_text(key: bytes) -> str:
    return b64encode(key).decode()
