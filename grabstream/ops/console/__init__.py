"""Output of the command line, progress of long work, and how signals stop it."""
