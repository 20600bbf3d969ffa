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

from grabstream.extras import MissingExtra, server_needed_by
from grabstream.ops.console.json_log import logs_json
from grabstream.ops.console.quiet import quiet_libraries
from grabstream.ops.console.terminal import guard_terminals

log = logging.getLogger("grabstream")

#: Verbs by group: the module in `ops/commands/`, or in `workshop/commands/` for those of this machine, and
#: the text of `--help`.
GROUPS: Final = {
    "Offers": {
        "open": ("offers.through_a_gate", "Open the offers of a file."),
        "amend": ("offers.operating", "Change terms of an open offer."),
        "load": ("offers.operating", "Load an offer's coupon codes, or the list of users who may grab."),
        "pause": ("offers.through_a_gate", "Refuse grabs of an offer until it is resumed."),
        "resume": ("offers.through_a_gate", "Accept grabs of a paused offer again."),
        "close": ("offers.through_a_gate", "Close an offer; units not taken go back to its issuer."),
        "approve": ("offers.approving", "Sign commands of operators, off-line."),
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
        "offers": ("read.offers", "List offers by state, kind, campaign, issuer or closing time."),
        "show": ("read.show", "Show an offer: who got what, the luckiest grab, what is left."),
        "why": ("read.why", "Show everything that happened between one user and one offer."),
        "at": ("read.at", "Show offers, holds and balances as they were at a time."),
        "verify-fair": ("read.verify_fair", "Compute every part of a closed envelope from its events."),
        "prove": ("read.prove", "Prove with a small file that one grab is in the history."),
        "verify-proof": ("read.prove", "Check the proof of a grab; asks no server."),
        "result": ("read.result", "Show what became of the offers of a week, as table, CSV, JSON or HTML."),
        "whatif": ("read.whatif", "Decide past commands again under changed terms, and show the difference."),
        "status": ("read.status", "Show servers, shards and read models: progress and what has stopped."),
    },
    "Operate": {
        "init": ("operate.init", "Create topics and tables."),
        "worker": ("operate.worker", "Run a worker with the given roles."),
        "gateway": ("operate.gateway", "Serve commands and questions over HTTP."),
        "keys": ("operate.keys", "Create, list, rotate and revoke API keys of services."),
        "grants": ("operate.grants", "Print or give the least rights of each role on the three servers."),
        "reseal": ("operate.reseal", "Seal secrets with the newest seal key, and retire old keys."),
        "forget": ("operate.forget", "Make the personal data of a user unreadable, for good."),
        "doctor": ("operate.doctor", "Show what is stuck, since when, and the command that fixes it."),
        "verify": ("operate.verify", "Compare books, audit trail and Redis with the journal."),
        "checkpoint": ("operate.checkpoint", "Write signed heads of all shards, to compare with later."),
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
        "rebuild": ("rebuild.read_models", "Rebuild read models from the events, next to the live versions."),
        "replay": ("rebuild.replay", "Read past events again: into lines, a topic, or a separate schema."),
        "export": ("rebuild.export", "Export the journal as Parquet files, for DuckDB and other tools."),
        "verify-archive": ("rebuild.export", "Verify every file of an archive that `export` has written."),
        "dump": ("rebuild.dump", "Write the records of the journal, for readers in other languages."),
        "follow": ("rebuild.follow", "Run a projection of your own."),
    },
    "This machine": {
        "up": ("services", "Start the local servers."),
        "down": ("services", "Stop the local servers that `up` started."),
        "rehearse": ("rehearse", "Let a made-up crowd grab, watch it live, and get a verdict."),
        "fake-payments": ("fake_payments", "Run a payment provider that moves no money, for tests."),
    },
}
VERBS: Final = {name: verb for group in GROUPS.values() for name, verb in group.items()}


def module_of(verb: str) -> str:
    """The module of a verb."""
    room = "workshop" if verb in GROUPS["This machine"] else "ops"
    return f"grabstream.{room}.commands.{VERBS[verb][0]}"


class _Verbs(click.Group):
    """Imports a verb's module only when the verb is used, so that --help is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        # A keyword such as `return` cannot name a function: that function's name ends with _.
        function = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name.replace("-", "_")
        with server_needed_by("the command line"):
            module = importlib.import_module(module_of(cmd_name))
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
    # A program that calls this, and has set its log up itself, keeps it as it is.
    if not logging.getLogger().handlers:
        logging.basicConfig(
            level=level, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
        )
        quiet_libraries()
    logging.getLogger("aiokafka").setLevel(logging.INFO if verbose else logging.CRITICAL)
    # What it says of a rollback without a server is a consequence of the error that is reported.
    logging.getLogger("psycopg").setLevel(logging.INFO if verbose else logging.ERROR)


def main() -> None:
    """Runs the command line. An error of a known kind becomes one line and an exit code."""
    guard_terminals()
    try:
        grabstream()
    except MissingExtra as error:
        _end(1, str(error))
    except Exception as error:
        # Imported when there is an error: clients of all servers come with it, and take most of a second.
        from grabstream.ops.console.endings import ending_of

        ending = ending_of(error)
        if ending is None:
            raise
        _end(*ending)


def _end(code: int, message: str) -> NoReturn:
    if logs_json():
        log.critical("%s", message)
    else:
        click.echo(f"grabstream: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
