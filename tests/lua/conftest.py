"""Fixtures for tests of scripts and gate."""

from tests.support.shards import (  # noqa: F401
    client,
    cluster_port,
    keys,
    make_gate,
    private_redis,
    private_server,
    scene,
)
