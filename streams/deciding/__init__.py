"""From commands to decisions: the decider of the topic, and the sweeper, which does what time demands."""
