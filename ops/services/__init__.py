"""Local servers as plain processes: Redis, Kafka and PostgreSQL under one directory, on their own ports.

For machines without a Docker engine, and for tests that need servers of their own to kill.
"""

from ops.services.local import LocalServices, free_ports
from ops.services.process import ServiceError

__all__ = ["LocalServices", "ServiceError", "free_ports"]
