"""Decisions: the Lua scripts, the loader that assembles them, the function library, and the Redis keys."""
