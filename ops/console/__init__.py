"""What the command line prints, and how it is stopped."""
