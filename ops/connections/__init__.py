"""All that opens a connection for a process."""
