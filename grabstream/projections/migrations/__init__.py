"""SQL files, applied in the order of their numbers."""
