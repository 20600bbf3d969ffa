"""History, read again from any point, into any sink."""
