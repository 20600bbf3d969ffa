"""Measuring: the rows of the performance table, each against the classic way, both in one run."""
