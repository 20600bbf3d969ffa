"""Operating it: settings, command line, local services, rehearsal. It reads the settings and passes values
on.
"""

import os
import signal
import sys

from grabstream.extras import MissingExtra, server_needed_by


def main() -> None:
    """The console script. Importing the command line takes half a second: Ctrl-C meanwhile ends the process
    as it does later, with 130.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        # Not left to KeyboardInterrupt: it would come out of whatever is being imported.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    try:
        with server_needed_by("the command line"):
            from grabstream.ops.cli import main as run
    except MissingExtra as error:
        sys.exit(f"grabstream: {error}")

    signal.signal(signal.SIGINT, before)
    run()
