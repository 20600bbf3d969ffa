"""Local servers as plain processes: Redis, Kafka and PostgreSQL under one directory, on their own ports.

For machines without a Docker engine, and for tests that kill servers.
"""

from grabstream.workshop.services.cluster import ClusterPorts, ClusterServices
from grabstream.workshop.services.local import LocalServices, ServerSet, free_ports
from grabstream.workshop.services.process import ServiceError
from grabstream.workshop.services.secure import SecureServices

__all__ = [
    "ClusterPorts", "ClusterServices", "LocalServices", "SecureServices", "ServerSet", "ServiceError",
    "free_ports",
]  # fmt: skip
