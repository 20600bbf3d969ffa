"""The command line: verbs, each in a module of its own that is imported when it is used.

Exit codes: 0 done · 1 refused, or a check failed · 2 used wrongly · 3 a server cannot be reached.
"""

import importlib
import keyword
import logging
import sys
from typing import Any, Final, NoReturn

import click
from aiokafka.errors import KafkaError
from psycopg import OperationalError
from psycopg.errors import InsufficientPrivilege, LockNotAvailable, UndefinedTable
from redis.exceptions import ConnectionError, TimeoutError

from grabstream.models.upcasting import BrokenChain
from grabstream.ops.services import ServiceError
from grabstream.ops.settings import BadSettings
from grabstream.projections.locks import Held
from grabstream.projections.versions import NoReadModel
from grabstream.streams.clients import in_words

VERBS: Final = {
    "up": ("grabstream.ops.commands.services", "Start the local servers."),
    "down": ("grabstream.ops.commands.services", "End the local servers, and only those."),
    "status": (
        "grabstream.ops.commands.status",
        "Servers, shards and read models: what runs, how far, what stopped.",
    ),
    "config": ("grabstream.ops.commands.config", "The settings in force, secrets masked."),
    "init": ("grabstream.ops.commands.init", "Create topics and tables."),
    "schemas": ("grabstream.ops.commands.schemas", "What of the database is this system's: for backups."),
    "worker": ("grabstream.ops.commands.worker", "Play the roles of a worker."),
    "open": ("grabstream.ops.commands.offers", "Open the offers of a file."),
    "pause": ("grabstream.ops.commands.offers", "Refuse grabs of an offer until it is resumed."),
    "resume": ("grabstream.ops.commands.offers", "Take grabs of an offer again."),
    "close": ("grabstream.ops.commands.offers", "End an offer; what is left goes back."),
    "amend": ("grabstream.ops.commands.operating", "Change terms of an offer while it runs."),
    "load": (
        "grabstream.ops.commands.operating",
        "Give an offer its coupon codes, or the list of who may grab.",
    ),
    "adjust": (
        "grabstream.ops.commands.operating",
        "Book a correcting entry, with its reason and who approved it.",
    ),
    "grab": ("grabstream.ops.commands.offers", "Grab, as one user."),
    "confirm": ("grabstream.ops.commands.settling", "A hold was paid: its units are the user's for good."),
    "release": ("grabstream.ops.commands.settling", "Give a hold back, or leave the waiting list."),
    "extend": ("grabstream.ops.commands.settling", "Move a hold's deadline, as often as the offer allows."),
    "return": (
        "grabstream.ops.commands.settling",
        "Give back what was taken for good; money paid for it goes back.",
    ),
    "redeem": ("grabstream.ops.commands.settling", "Use units of a grab, once for an order."),
    "unredeem": ("grabstream.ops.commands.settling", "Take the use for an order back."),
    "ticket": ("grabstream.ops.commands.operating", "Sign a ticket for one user, for tests."),
    "show": ("grabstream.ops.commands.show", "An offer: who got what, the luckiest, what is left."),
    "why": ("grabstream.ops.commands.why", "The whole story of one user and one offer."),
    "doctor": (
        "grabstream.ops.commands.doctor",
        "Say what is stuck, since when, and the command that mends it.",
    ),
    "dismiss": ("grabstream.ops.commands.doctor", "Explain a difference that the verifier has found."),
    "set-aside": (
        "grabstream.ops.commands.set_aside",
        "Let a stopped read model go on behind a record it cannot take in.",
    ),
    "retry": (
        "grabstream.ops.commands.set_aside",
        "Let a stopped read model try again, its cause being mended.",
    ),
    "verify": ("grabstream.ops.commands.verify", "Check chain, books, and Redis against the ledger."),
    "rebuild": (
        "grabstream.ops.commands.rebuild",
        "Make read models anew from the events, beside the live ones.",
    ),
    "replay": (
        "grabstream.ops.commands.replay",
        "Events once more: as lines, on a topic, or as read models of their own.",
    ),
    "at": ("grabstream.ops.commands.at", "Offers, holds and balances as they were at a time."),
    "follow": ("grabstream.ops.commands.follow", "Run a projection of your own."),
    "rehearse": ("grabstream.ops.commands.rehearse", "Let a crowd grab, watch it, and end with a verdict."),
}


class _Verbs(click.Group):
    """Imports a verb's module only when the verb is used, so that --help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        # `return` cannot name a function: those of Python's own words end with _.
        function = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name.replace("-", "_")
        command = getattr(importlib.import_module(VERBS[cmd_name][0]), function)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Not left to click, which would call it a refusal.
            _end(130, "stopped")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, words) for name, (_, words) in VERBS.items()])


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="grabstream")
@click.option("-v", "--verbose", is_flag=True, help="Log what goes on, to standard error.")
def grabstream(verbose: bool) -> None:
    """Limited things that a crowd grabs at once: decided in Redis, journaled in Kafka, accounted for in
    PostgreSQL.
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
    logging.getLogger("aiokafka").setLevel(logging.INFO if verbose else logging.CRITICAL)


def main() -> None:
    """Runs the command line; errors of known kinds become one clear line and an exit code."""
    try:
        grabstream()
    except BadSettings as error:
        _end(2, str(error))
    except ServiceError as error:
        _end(3, str(error))
    except BrokenChain as error:
        _end(
            1,
            f"this program could not read its own old events: {error}; docs/events.md says how to write an "
            "upcaster",
        )
    except (ConnectionError, TimeoutError) as error:
        _end(3, f"Redis cannot be reached (GRAB_REDIS_URL): {error}")
    except KafkaError as error:
        _end(3, f"Kafka cannot be reached or refused (GRAB_KAFKA): {in_words(error)}")
    except InsufficientPrivilege as error:
        _end(
            2,
            f"PostgreSQL refuses it to this role: {error.diag.message_primary}: docs/operating.md names what "
            "it needs",
        )
    except Held as error:
        _end(
            1,
            f"not done, since another session has what is needed, and does not let go: {error}. Try again "
            "when it has ended",
        )
    except LockNotAvailable as error:
        _end(1, f"somebody else holds what is needed, for too long ({error.diag.message_primary}): try again")
    except OperationalError as error:
        _end(3, f"PostgreSQL cannot be reached (GRAB_POSTGRES): {str(error).strip()}")
    except UndefinedTable as error:
        _end(
            2,
            f"tables are missing ({error.diag.message_primary}): `grabstream init` makes them, in "
            "GRAB_SCHEMA",
        )
    except NoReadModel as error:
        _end(2, str(error))


def _end(code: int, message: str) -> NoReturn:
    click.echo(f"grabstream: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
