"""Decisions: the Lua scripts, the loader that assembles them, the Redis keys, and the gate, which calls the
scripts from Python.
"""
