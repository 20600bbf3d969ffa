"""The pure core: commands, events, outcomes, money and rules. No I/O, no clock, no randomness."""
