"""A simulation of the whole pipeline: one process, one seed, every order of events (docs/simulation.md)."""
