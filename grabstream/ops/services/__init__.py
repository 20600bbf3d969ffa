"""Local servers as plain processes: Redis, Kafka and PostgreSQL under one directory, on their own ports.

For machines without a Docker engine, and for tests that kill servers.
"""

from grabstream.ops.services.cluster import ClusterPorts, ClusterServices
from grabstream.ops.services.local import LocalServices, ServerSet, free_ports
from grabstream.ops.services.process import ServiceError
from grabstream.ops.services.secure import SecureServices

__all__ = [
    "ClusterPorts", "ClusterServices", "LocalServices", "SecureServices", "ServerSet", "ServiceError",
    "free_ports",
]  # fmt: skip
