"""Exit codes and messages for errors of a known kind. Imported only on an error, because the error classes of
the servers' clients import the whole clients.
"""

import asyncio

from aiokafka.errors import KafkaError
from psycopg import OperationalError
from psycopg.errors import InsufficientPrivilege, LockNotAvailable, QueryCanceled, UndefinedTable
from redis.exceptions import ConnectionError, NoPermissionError, TimeoutError

from grabstream.connections.logins import refusal
from grabstream.models.upcasting import BrokenChain
from grabstream.projections.database.locks import LockTaken
from grabstream.projections.versions import NoReadModel
from grabstream.settings import BadSettings, ServerFailed, load_settings
from grabstream.streams.buckets import StoreAway, StoreRefused
from grabstream.streams.clients import DoesNotStop, error_text
from grabstream.streams.projecting.projector import EXIT_UNKNOWN_ERROR


def ending_of(error: Exception) -> tuple[int, str] | None:
    """The exit code, and the line that says what failed and the fix; None for an unknown error."""
    match error:
        case BadSettings():
            return 2, str(error)
        case ServerFailed():
            return 3, str(error)
        case BrokenChain():
            return 1, (
                f"the upcasters of this program have a gap: {error}; docs/events.md explains how to write an "
                "upcaster"
            )
        case ConnectionError() | TimeoutError():
            return 3, _refused(error) or f"Redis cannot be reached (GRAB_REDIS_URL): {error}"
        case NoPermissionError():
            return 2, (
                f"the Redis user of GRAB_REDIS_URL lacks a right: {error}; `grabstream grants` prints "
                "the rights of each role"
            )
        case StoreAway():
            return 3, str(error)
        case StoreRefused():
            return 1, str(error)
        case KafkaError():
            words = f"Kafka cannot be reached, or refused a request (GRAB_KAFKA): {error_text(error)}"
            return 3, _refused(error) or words
        case InsufficientPrivilege():
            return 2, (
                f"the PostgreSQL role of GRAB_POSTGRES lacks a privilege: {error.diag.message_primary}; "
                "docs/operating.md lists the privileges that it needs"
            )
        case LockTaken():
            return 1, (
                f"the command changed nothing, because another PostgreSQL session holds a lock: {error}. "
                "Try again when that session has ended"
            )
        case LockNotAvailable():
            return 1, (
                "another PostgreSQL session holds a lock for too long "
                f"({error.diag.message_primary}): try again"
            )
        case QueryCanceled():
            return 1, (
                f"PostgreSQL ended a statement ({error.diag.message_primary}): if GRAB_POSTGRES names a "
                "`statement_timeout` in its options, raise it, or leave it out; otherwise an administrator "
                "has canceled it: run the command again"
            )
        case OperationalError():
            return 3, _refused(error) or f"PostgreSQL cannot be reached (GRAB_POSTGRES): {str(error).strip()}"
        case UndefinedTable():
            return 2, (
                f"tables are missing ({error.diag.message_primary}): run `grabstream init` to create them in "
                "GRAB_SCHEMA"
            )
        case NoReadModel():
            return 2, str(error)
        case DoesNotStop():
            return EXIT_UNKNOWN_ERROR, (
                f"a client of Kafka does not stop: {error}. The process ends, so that its group assigns its "
                "partitions to other workers; start it again"
            )
    return None


def _refused(error: Exception) -> str:
    """Why the server that an error came from refuses this process, and what to do; '' when it does not."""
    return asyncio.run(refusal(load_settings(), error))
