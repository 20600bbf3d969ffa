"""What moves events: topics, decider, relay, sweeper, journal reader, and the Faust app with its agents."""
