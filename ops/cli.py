"""The command line: verbs, each in a module of its own that is imported when it is used.

Exit codes: 0 done · 1 refused, or a check failed · 2 used wrongly · 3 a server cannot be reached.
"""

import difflib
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
from grabstream.ops.settings import BadSettings, unknown_names
from grabstream.projections.database.locks import Held
from grabstream.projections.versions import NoReadModel
from grabstream.streams.clients import in_words

#: Verbs by group: the module in `ops/commands/`, and what `--help` says.
GROUPS: Final = {
    "Offers": {
        "open": ("offers.through_a_gate", "Open the offers of a file."),
        "amend": ("offers.operating", "Change terms of an offer while it runs."),
        "load": ("offers.operating", "Give an offer its coupon codes, or the list of who may grab."),
        "pause": ("offers.through_a_gate", "Refuse grabs of an offer until it is resumed."),
        "resume": ("offers.through_a_gate", "Take grabs of an offer again."),
        "close": ("offers.through_a_gate", "End an offer; what is left goes back."),
        "adjust": ("offers.operating", "Book a correcting entry, with its reason and who approved it."),
    },
    "Grabs": {
        "grab": ("offers.through_a_gate", "Grab, as one user."),
        "confirm": ("offers.settling", "A hold was paid: its units are the user's for good."),
        "release": ("offers.settling", "Give a hold back, or leave the waiting list."),
        "extend": ("offers.settling", "Move a hold's deadline, as often as the offer allows."),
        "return": ("offers.settling", "Give back what was taken for good; money paid for it goes back."),
        "redeem": ("offers.settling", "Use units of a grab, once for an order."),
        "unredeem": ("offers.settling", "Take the use for an order back."),
        "ticket": ("offers.operating", "Sign a ticket for one user, for tests."),
    },
    "Read": {
        "show": ("read.show", "An offer: who got what, the luckiest, what is left."),
        "why": ("read.why", "The whole story of one user and one offer."),
        "at": ("read.at", "Offers, holds and balances as they were at a time."),
        "status": ("read.status", "Servers, shards and read models: what runs, how far, what stopped."),
    },
    "Operate": {
        "init": ("operate.init", "Create topics and tables."),
        "worker": ("operate.worker", "Play the roles of a worker."),
        "doctor": ("operate.doctor", "Say what is stuck, since when, and the command that mends it."),
        "verify": ("operate.verify", "Compare books, audit trail and Redis with the journal."),
        "dismiss": ("operate.doctor", "Explain a difference that the verifier has found."),
        "set-aside": (
            "operate.set_aside",
            "Let a stopped read model continue after a record that it refuses.",
        ),
        "retry": ("operate.set_aside", "Let a stopped read model try again, once its cause is removed."),
        "config": ("operate.config", "The settings in force, secrets masked."),
        "schemas": ("operate.schemas", "What of the database is this system's: for backups."),
        "completion": ("operate.completion", "Print the shell's completion script."),
    },
    "Rebuild": {
        "rebuild": ("rebuild.read_models", "Rebuild read models from the events, beside the live ones."),
        "replay": ("rebuild.replay", "Events again: as lines, on a topic, or as read models of their own."),
        "follow": ("rebuild.follow", "Run a projection of your own."),
    },
    "This machine": {
        "up": ("local.services", "Start the local servers."),
        "down": ("local.services", "End the local servers, and only those."),
        "rehearse": ("local.rehearse", "Let a crowd grab, watch it, and end with a verdict."),
    },
}
VERBS: Final = {name: verb for group in GROUPS.values() for name, verb in group.items()}


class _Verbs(click.Group):
    """Imports a verb's module only when the verb is used, so that --help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        # `return` cannot name a function: those of Python's own words end with _.
        function = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name.replace("-", "_")
        module = importlib.import_module(f"grabstream.ops.commands.{VERBS[cmd_name][0]}")
        command = getattr(module, function)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Not left to click, which would call it a refusal.
            _end(130, "stopped")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, verbs in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(10), words) for name, (_, words) in verbs.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = difflib.get_close_matches(args[0], VERBS, 1)
        if args[0] not in VERBS and near:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


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
    for line in unknown_names():
        click.echo(f"grabstream: {line}", err=True)


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
