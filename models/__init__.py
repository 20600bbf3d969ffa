"""The pure heart: commands, events, outcomes, money and rules. No I/O, no clock, no randomness."""
