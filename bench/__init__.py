"""Measures the rows of the performance table: this system and the classic way alternate in one run."""
