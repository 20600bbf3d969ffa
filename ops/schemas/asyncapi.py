"""The AsyncAPI document: which topics there are, what stands in them and under which key and headers, and how
long they keep it.
"""

from typing import Any, Final, get_args

from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.commands import AnyCommand
from grabstream.models.events import CURRENT_VERSIONS
from grabstream.models.identifiers import ID_PATTERN
from grabstream.models.upcasting import FIRST_VERSION
from grabstream.ops.schemas.documents import ANSWER, DIALECT, event_name, tag_of
from grabstream.ops.settings import Settings
from grabstream.streams.topics import Topics, retention_ms

ASYNCAPI_VERSION: Final = "3.0.0"
BINDING: Final = "0.5.0"
#: A schema of our own files: they are JSON Schema 2020-12, which has to be said.
SCHEMA_FORMAT: Final = "application/schema+json;version=2020-12"
PREFIX: Final = "{prefix}"

Node = dict[str, Any]

DESCRIPTION: Final = (
    "Limited things that a crowd grabs at once. Commands go in, answers and events come out; the journal is "
    "the truth. "
    "Partition = shard = CRC32(campaign) mod shards; the campaign of an offer is its id up to the first `:`."
)
DESCRIPTIONS: Final = {
    "commands": "Commands to decide, in any partition.",
    "results": "Answers, once they are journaled; each in the partition its command came from, and maybe "
    "twice.",
    "journal": "Blocks of events: the truth. A marker counts when its term is higher than that of every "
    "marker before it; a block "
    "counts when its term and owner are those of the last marker that counts. Drop events whose seq is "
    "already seen, stop at a gap. "
    "hash(n) = sha256(hash(n-1) ‖ line), from 32 zero bytes on. Events stay in the version they were written "
    "in.",
    "events": "Single events as CloudEvents in binary mode. May repeat, with the same id and bytes: drop seq "
    "at or below the highest "
    "seen in the partition. Events stay in the version they were written in.",
    "rejected": "The original bytes of what could not be understood.",
}


def document(version: str) -> Node:
    """The document of a release; its schemas are the files beside it."""
    return {
        "asyncapi": ASYNCAPI_VERSION,
        "info": {
            "title": "grabstream",
            "version": version,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": _channels(),
        "operations": _operations(),
        "components": {"messages": _messages(), "parameters": {"prefix": _prefix()}},
    }


def _prefix() -> Node:
    return {
        "default": Settings.model_fields["prefix"].default,
        "description": "GRAB_PREFIX: several systems may share the servers",
    }


def _channels() -> Node:
    topics = Topics(PREFIX)
    kept = retention_ms(topics)
    shards = Settings.model_fields["shards"].default
    said = {
        topics.commands: ("commands", ["command", "commands"]),
        topics.results: ("results", ["answer"]),
        topics.journal: ("journal", ["block", "marker"]),
        topics.events: ("events", [_message_of(type_) for type_ in CURRENT_VERSIONS]),
        topics.rejected: ("rejected", ["rejected"]),
    }
    return {
        name: {
            "address": topic,
            "description": DESCRIPTIONS[name],
            "parameters": {"prefix": {"$ref": "#/components/parameters/prefix"}},
            "messages": {message: {"$ref": f"#/components/messages/{message}"} for message in messages},
            "bindings": {
                "kafka": {
                    "partitions": 1 if topic == topics.rejected else shards,
                    "topicConfiguration": {
                        "retention.ms": kept[topic],
                        "max.message.bytes": RECORD_BYTES_MAX,
                    },
                    "bindingVersion": BINDING,
                }
            },
        }
        for topic, (name, messages) in said.items()
    }


def _operations() -> Node:
    """What grabstream does, by its own point of view: it receives commands, and sends the rest."""
    sent = {
        name: {"action": "send", "channel": {"$ref": f"#/channels/{name}"}, "summary": summary}
        for name, summary in (
            ("journal", "One block for each piece of an outbox, by the shard's one relay."),
            ("events", "Every event once more, for programs that do not read the journal."),
            ("rejected", "What was no command."),
        )
    }
    decide = {
        "action": "receive",
        "channel": {"$ref": "#/channels/commands"},
        "summary": "Decides commands, in the order of each record.",
        "reply": {
            "channel": {"$ref": "#/channels/results"},
            "messages": [{"$ref": "#/channels/results/messages/answer"}],
        },
    }
    return {"decide": decide, **sent}


# -- messages ------------------------------------------------------------------------------------------------


def _messages() -> Node:
    anything = {"oneOf": [_file(f"commands/{tag_of(command)}") for command in get_args(AnyCommand)]}
    return {
        "command": _message("one command", _schema(anything), _key("any; the offer's id is usual")),
        "commands": _message(
            "several commands, carried out in order; a bad one does not stop the others",
            _schema({"type": "array", "items": anything}),
            _key("any; the offer's id is usual"),
        ),
        "answer": _message(
            "the answer to a command", _schema(_file(ANSWER)), _key("the command's id", ID_PATTERN)
        ),
        "block": {
            **_message(
                "consecutive events of a shard, one a line (NDJSON)",
                _schema({"type": "string", "minLength": 1}),
                None,
            ),
            "contentType": "application/x-ndjson",
            "headers": _schema(BLOCK_HEADERS),
        },
        "marker": {
            **_message(
                "the begin of a term; its value is empty", _schema({"type": "string", "maxLength": 0}), None
            ),
            "contentType": "application/x-ndjson",
            "headers": _schema(MARKER_HEADERS),
        },
        **{_message_of(type_): _event(type_) for type_ in CURRENT_VERSIONS},
        "rejected": {
            **_message("the original bytes, under the original key", _schema({"type": "string"}), None),
            "contentType": "application/octet-stream",
            "headers": _schema(REJECTED_HEADERS),
        },
    }


def _event(type_: str) -> Node:
    versions = range(FIRST_VERSION, CURRENT_VERSIONS[type_] + 1)
    files = [_file(event_name(type_, version)) for version in versions]
    headers = {**EVENT_HEADERS, "properties": {**EVENT_HEADERS["properties"], "ce_type": {"const": type_}}}
    payload = _schema(files[0] if len(files) == 1 else {"oneOf": files})
    return {
        **_message(
            f"{type_}, written in version {versions[-1]}", payload, _key("the offer's id", ID_PATTERN)
        ),
        "headers": _schema(headers),
    }


def _message_of(type_: str) -> str:
    return type_.replace(".", "_")


def _message(summary: str, payload: Node, key: Node | None) -> Node:
    bindings: Node = {"bindingVersion": BINDING} if key is None else {"key": key, "bindingVersion": BINDING}
    return {"summary": summary, "payload": payload, "bindings": {"kafka": bindings}}


def _key(description: str, pattern: str | None = None) -> Node:
    return {"type": "string", "description": description} | ({"pattern": pattern} if pattern else {})


def _file(name: str) -> Node:
    return {"$ref": f"./{name}.json"}


def _schema(schema: Node) -> Node:
    return {
        "schemaFormat": SCHEMA_FORMAT,
        "schema": schema if "$ref" in schema else {"$schema": DIALECT, **schema},
    }


# -- headers: their values are text --------------------------------------------------------------------------


def _headers(required: Node, optional: Node | None = None) -> Node:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


_NUMBER: Final = {"type": "string", "pattern": "^[0-9]+$"}
_HASH: Final = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_TERM: Final = {
    "shard": _NUMBER,
    "term": {**_NUMBER, "description": "raised by every relay that takes the shard over"},
    "owner": {"type": "string", "description": "drawn at random for each attempt to take the shard over"},
}
MARKER_HEADERS: Final = _headers({**_TERM, "count": {"const": "0"}})
BLOCK_HEADERS: Final = _headers(
    {
        **_TERM,
        "first_seq": _NUMBER,
        "count": {"type": "string", "pattern": "^[1-9][0-9]*$"},
        "prev": {**_HASH, "description": "the chain's hash before the first line"},
        "head": {**_HASH, "description": "the chain's hash behind the last line"},
    }
)
EVENT_HEADERS: Final = _headers(
    {
        "content-type": {"const": "application/json"},
        "ce_specversion": {"const": "1.0"},
        "ce_id": {"type": "string", "pattern": "^[0-9]+-[0-9]+$", "description": "<shard>-<seq>"},
        "ce_type": {"type": "string"},
        "ce_source": {"type": "string", "description": "grabstream/<prefix>"},
        "ce_time": {"type": "string", "format": "date-time"},
        "ce_subject": {"type": "string", "pattern": ID_PATTERN, "description": "the offer's id"},
    },
    {"cursor": {"type": "string", "description": "the publisher's own, on some records: ignore it"}},
)
REJECTED_HEADERS: Final = _headers(
    {
        "reason": {"type": "string"},
        "topic": {"type": "string"},
        "partition": _NUMBER,
        "offset": _NUMBER,
        "index": {
            **_NUMBER,
            "description": "ordinal of the command within the record, from 0; of several bad ones, the first",
        },
    },
    {
        "piece": {**_NUMBER, "description": "bytes too long for one record: ordinal of the piece, from 1"},
        "pieces": {
            **_NUMBER,
            "description": "number of pieces that make up the bytes, when there are several",
        },
        "part": {
            "const": "key",
            "description": "the bytes are those of the record's key, which was too long to be kept as one",
        },
    },
)
