"""A long steady load over all roles, after which memory must be flat and the lag bounded (`python -m
tests.soak`).
"""
