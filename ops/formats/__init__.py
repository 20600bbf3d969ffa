"""What people write, read strictly: offer files, times, durations, limits."""
