"""The clients are tested with the running system of the gateway's tests."""

from tests.gateway.conftest import door, offer, plain_door

__all__ = ["door", "offer", "plain_door"]
