"""Diagnosis: what is stuck, since when, what that means, and the command that mends it; and the story of one
user and one offer.

Each server is read once; checks are functions of these readings. A server that is away never hides what the
others say.
"""
