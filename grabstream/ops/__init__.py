"""Operation: settings, command line, verification, metrics. This room reads the settings and passes their
values to the other rooms.
"""

import os
import signal
import sys

from grabstream.extras import MissingExtra, server_needed_by


def main() -> None:
    """The console script. Ctrl-C ends the process with 130 while it imports the command line, too. SIGTERM
    ends it with 143 wherever nothing else handles it, also the first process of a container.
    """
    if os.getpid() == 1:
        # The kernel drops a signal to this process that has its default action.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        # A KeyboardInterrupt would be raised inside the module that is being imported.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    try:
        with server_needed_by("the command line"):
            from grabstream.ops.cli import main as run
    except MissingExtra as error:
        sys.exit(f"grabstream: {error}")

    signal.signal(signal.SIGINT, before)
    run()
