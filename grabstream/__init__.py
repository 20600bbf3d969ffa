"""grabstream: an event-sourced stream processor for limited things that a crowd grabs at once."""
