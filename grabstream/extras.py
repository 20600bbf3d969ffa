"""Extras: optional dependencies, and the error when one of them is missing.

Without extras, only what a service needs is installed; the extra `server` installs everything else. Where
grabstream is installed, `pip install 'grabstream[server]'` adds it: docs/clients.md, "Install".
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final

INSTALL_SERVER: Final = "pip install 'grabstream[server]'"
INSTALL_ANALYSTS: Final = "pip install 'grabstream[server,analysts]'"
#: The modules that only the extra `server` installs.
SERVER_MODULES: Final = frozenset(
    {
        "click",
        "cryptography",
        "faust",
        "hiredis",
        "httptools",
        "joserfc",
        "jwt",
        "limits",
        "opentelemetry",
        "prometheus_client",
        "psycopg",
        "psycopg_pool",
        "redis",
        "rich",
        "standardwebhooks",
        "starlette",
    }
    | {"uvicorn", "uvloop", "yaml"}
)


class MissingExtra(ImportError):
    """A feature needs an extra that is not installed. The text says how to install it."""


def installed(module: str) -> bool:
    """Whether a module of an extra can be imported."""
    return find_spec(module) is not None


@contextmanager
def server_needed_by(feature: str) -> Iterator[None]:
    """For use around an import: raises MissingExtra instead of ModuleNotFoundError for a module of the extra
    `server`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in SERVER_MODULES:
            raise
        raise MissingExtra(
            f"{feature} needs the extra `server` ({error.name} is not installed): {INSTALL_SERVER}",
            name=error.name,
        ) from error
