"""The app for `faust -A grabstream.streams.app worker`: the read models, with the settings of this system.

Nothing connects at import. `grabstream worker` does not use it.
"""

import sys
from functools import partial

from grabstream.connections.opening import wait_until_known
from grabstream.settings import BadSettings, load_settings
from grabstream.streams.projecting.agents import build_app, make_projectors

try:
    _settings = load_settings()
except BadSettings as error:
    sys.stderr.write(f"grabstream: {error}\n")
    sys.exit(2)

app = build_app(
    _settings.brokers,
    _settings.prefix,
    _settings.shards,
    make_projectors(
        _settings.brokers, _settings.prefix, _settings.shards, _settings.postgres, _settings.schema_
    ),
    partial(wait_until_known, _settings),
)
