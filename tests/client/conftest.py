"""The clients are tested with the running system of the gateway's tests."""

from tests.gateway.conftest import door, offer

__all__ = ["door", "offer"]
