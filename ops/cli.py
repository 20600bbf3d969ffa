"""The command line. The module of a verb is imported when the verb is used.

Exit codes: 0 done · 1 refused, or a check failed · 2 wrong usage or settings · 3 a server cannot be reached.
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

#: Verbs by group: the module in `ops/commands/`, and the text of `--help`.
GROUPS: Final = {
    "Offers": {
        "open": ("offers.through_a_gate", "Open the offers of a file."),
        "amend": ("offers.operating", "Change terms of an open offer."),
        "load": ("offers.operating", "Load an offer's coupon codes, or the list of users who may grab."),
        "pause": ("offers.through_a_gate", "Refuse grabs of an offer until it is resumed."),
        "resume": ("offers.through_a_gate", "Accept grabs of a paused offer again."),
        "close": ("offers.through_a_gate", "Close an offer; units not taken go back to its issuer."),
        "adjust": ("offers.operating", "Book a correcting entry, with its reason and approver."),
    },
    "Grabs": {
        "grab": ("offers.through_a_gate", "Grab units of an offer for one user."),
        "confirm": ("offers.settling", "Confirm a paid hold: its units become the user's for good."),
        "release": ("offers.settling", "End a hold, or leave the waiting list."),
        "extend": ("offers.settling", "Extend a hold's deadline, as often as the offer allows."),
        "return": ("offers.settling", "Return units of a granted or confirmed grab; payments are refunded."),
        "redeem": ("offers.settling", "Use units of a grab for an order, once per order."),
        "unredeem": ("offers.settling", "Undo the use of units for an order."),
        "ticket": ("offers.operating", "Sign a ticket for one user, for tests."),
    },
    "Read": {
        "show": ("read.show", "Show an offer: who got what, the luckiest grab, what is left."),
        "why": ("read.why", "Show everything that happened between one user and one offer."),
        "at": ("read.at", "Show offers, holds and balances as they were at a time."),
        "status": ("read.status", "Show servers, shards and read models: progress and what has stopped."),
    },
    "Operate": {
        "init": ("operate.init", "Create topics and tables."),
        "worker": ("operate.worker", "Run a worker with the given roles."),
        "gateway": ("operate.gateway", "Serve commands and questions over HTTP."),
        "keys": ("operate.keys", "Create, list, rotate and revoke API keys of services."),
        "doctor": ("operate.doctor", "Show what is stuck, since when, and the command that mends it."),
        "verify": ("operate.verify", "Compare books, audit trail and Redis with the journal."),
        "dismiss": ("operate.doctor", "Dismiss a finding of the verifier, with its explanation."),
        "set-aside": (
            "operate.set_aside",
            "Let a stopped read model continue after a record that it cannot apply.",
        ),
        "retry": ("operate.set_aside", "Let a stopped read model try again, once its cause is removed."),
        "webhooks": ("operate.webhooks", "Send events to URLs; list what was not delivered; send it again."),
        "config": ("operate.config", "Show the settings in force, secrets masked."),
        "schemas": ("operate.schemas", "List the system's schemas in the database, for backups."),
        "completion": ("operate.completion", "Print the shell's completion script."),
    },
    "Rebuild": {
        "rebuild": ("rebuild.read_models", "Rebuild read models from the events, beside the live versions."),
        "replay": ("rebuild.replay", "Read past events again: into lines, a topic, or a separate schema."),
        "follow": ("rebuild.follow", "Run a projection of your own."),
    },
    "This machine": {
        "up": ("local.services", "Start the local servers."),
        "down": ("local.services", "Stop the local servers that `up` started."),
        "rehearse": ("local.rehearse", "Let a made-up crowd grab, watch it live, and get a verdict."),
        "fake-payments": ("local.fake_payments", "Run a payment provider that moves no money, for tests."),
    },
}
VERBS: Final = {name: verb for group in GROUPS.values() for name, verb in group.items()}


class _Verbs(click.Group):
    """Imports a verb's module only when the verb is used, so that --help is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        # A keyword such as `return` cannot name a function: that function's name ends with _.
        function = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name.replace("-", "_")
        module = importlib.import_module(f"grabstream.ops.commands.{VERBS[cmd_name][0]}")
        command = getattr(module, function)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Click would report it as a refusal.
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
@click.option("-v", "--verbose", is_flag=True, help="Log details to standard error.")
def grabstream(verbose: bool) -> None:
    """Gives out limited things that a crowd grabs at once: decided in Redis, journaled in Kafka, accounted
    for in PostgreSQL.
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
    logging.getLogger("aiokafka").setLevel(logging.INFO if verbose else logging.CRITICAL)
    for line in unknown_names():
        click.echo(f"grabstream: {line}", err=True)


def main() -> None:
    """Runs the command line. An error of a known kind becomes one line and an exit code."""
    try:
        grabstream()
    except BadSettings as error:
        _end(2, str(error))
    except ServiceError as error:
        _end(3, str(error))
    except BrokenChain as error:
        _end(
            1,
            f"the upcasters of this program have a gap: {error}; docs/events.md explains how to write an "
            "upcaster",
        )
    except (ConnectionError, TimeoutError) as error:
        _end(3, f"Redis cannot be reached (GRAB_REDIS_URL): {error}")
    except KafkaError as error:
        _end(3, f"Kafka cannot be reached, or refused a request (GRAB_KAFKA): {in_words(error)}")
    except InsufficientPrivilege as error:
        _end(
            2,
            f"the PostgreSQL role of GRAB_POSTGRES lacks a privilege: {error.diag.message_primary}; "
            "docs/operating.md lists the privileges that it needs",
        )
    except Held as error:
        _end(
            1,
            f"nothing was done, because another session of PostgreSQL holds a lock: {error}. Try again when "
            "it has ended",
        )
    except LockNotAvailable as error:
        _end(
            1,
            f"another PostgreSQL session holds a lock for too long ({error.diag.message_primary}): try again",
        )
    except OperationalError as error:
        _end(3, f"PostgreSQL cannot be reached (GRAB_POSTGRES): {str(error).strip()}")
    except UndefinedTable as error:
        _end(
            2,
            f"tables are missing ({error.diag.message_primary}): run `grabstream init` to create them in "
            "GRAB_SCHEMA",
        )
    except NoReadModel as error:
        _end(2, str(error))


def _end(code: int, message: str) -> NoReturn:
    click.echo(f"grabstream: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
