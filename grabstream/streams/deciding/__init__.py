"""The decider, which decides the commands of the topic, and the sweeper, which does what is due at a time."""
