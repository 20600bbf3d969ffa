"""Cryptography: seals of seeds and codes, signed texts, encrypted tokens, tickets."""
