"""The verbs of the command line, a module each; they are imported only when they are used."""
