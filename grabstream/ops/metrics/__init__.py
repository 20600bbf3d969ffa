"""What a process says about itself: metrics for Prometheus, and whether it is alive and ready.

Roles count with plain numbers (`lua/measures.py`); everything else is read when somebody asks, so an idle
process costs nothing.
"""
