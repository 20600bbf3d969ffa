"""Rehearsals: a crowd of made-up users on a system of its own, shown live and checked at the end by a
verdict.
"""
