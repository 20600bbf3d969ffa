"""From the journal to read models and `grab.events`: projectors, Faust agents, publisher, verifier."""
