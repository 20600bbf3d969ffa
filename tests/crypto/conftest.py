"""Fixtures for tests of sealing and signatures, many through a gate."""

from tests.support.shards import (  # noqa: F401
    client,
    cluster_port,
    keys,
    make_gate,
    private_redis,
    private_server,
    scene,
)
