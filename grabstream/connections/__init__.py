"""Connections of a process to Redis, Kafka and PostgreSQL, and whether the servers belong to one system."""
