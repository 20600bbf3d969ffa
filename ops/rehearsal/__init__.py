"""A rehearsal: a crowd grabs through the topic and through the gate at once, is watched live, and ends with a
verdict.
"""
