"""The app for `faust -A streams.app worker`: the read models, with the settings of this system. Nothing
connects at import.
"""

from functools import partial

from grabstream.ops.connections.opening import until_known
from grabstream.ops.settings import load_settings
from grabstream.streams.projecting.agents import build_app, make_projectors

_settings = load_settings()

app = build_app(
    _settings.kafka,
    _settings.prefix,
    _settings.shards,
    make_projectors(
        _settings.kafka, _settings.prefix, _settings.shards, _settings.postgres, _settings.schema_
    ),
    partial(until_known, _settings),
)
