"""Monitoring of a process: metrics for Prometheus, and whether it is alive and ready.

Roles count with plain numbers (`runtime/measures.py`); everything else is read on request, so an idle process
costs nothing.
"""
