"""Strict reading of what people write: offer files, times, durations, limits, replay options."""
