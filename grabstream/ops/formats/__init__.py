"""Strict parsing of user input: offer files, times, durations, limits, replay options."""
