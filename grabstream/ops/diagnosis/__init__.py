"""Diagnosis: `doctor` finds what is stuck, since when, what it means, and the command that repairs it; `why`
shows the history of one user in one offer.

Each server is read once. Checks are functions of these readings. A server that does not answer does not hide
findings about the others.
"""
