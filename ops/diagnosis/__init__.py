"""Diagnosis: what is stuck, since when, what that means, and the command that mends it; and the story of one
user and one offer.

Facts are read once from each server; checks are functions of the facts. One server that is away never hides
what the others say.
"""
