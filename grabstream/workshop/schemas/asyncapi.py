"""The AsyncAPI document: the topics, their records with keys and headers, and how long they are kept."""

from typing import Any, Final, get_args

from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.commands import AnyCommand
from grabstream.models.events import CURRENT_VERSIONS, LineEvent
from grabstream.models.identifiers import ID_PATTERN
from grabstream.models.runs import AnyRun
from grabstream.models.schema_documents import ANSWER, DIALECT, REFUSED, run_name, tag_of
from grabstream.models.schema_ids import event_name, schema_id
from grabstream.models.upcasting import FIRST_VERSION
from grabstream.settings import Settings
from grabstream.streams.topics import Topics, retention_ms

ASYNCAPI_VERSION: Final = "3.0.0"
BINDING: Final = "0.5.0"
#: The files are JSON Schema 2020-12, which AsyncAPI does not assume.
SCHEMA_FORMAT: Final = "application/schema+json;version=2020-12"
PREFIX: Final = "{prefix}"

Node = dict[str, Any]

DESCRIPTION: Final = (
    "Gives away or sells limited offers that many users grab at once. Commands go in, answers and events "
    "come out; the journal is the truth. "
    "Partition = shard = CRC32(campaign) mod shards; the campaign of an offer is its id up to the first `:`."
)
DESCRIPTIONS: Final = {
    "commands": "Commands to decide that users cause, in any partition: grab, confirm, release, extend, "
    "return, redeem, unredeem.",
    "operations": "Commands to decide of operators, in any partition: open, load, amend, pause, resume, "
    "close, adjust.",
    "results": "Answers, after they are journaled, each in the partition of its command. May be repeated.",
    "journal": "Blocks of events: the truth. A marker counts when its term is higher than that of every "
    "marker before it; a block counts when its term and owner are those of the last marker that counts. Drop "
    "events whose seq was already read, stop at a gap. hash(n) = sha256(hash(n-1) ‖ line), starting from 32 "
    "zero bytes. Events keep the version in which they were written.",
    "events": "Single events as CloudEvents in binary mode. An event may be repeated, with the same id and "
    "bytes: drop events whose seq is not above the highest seq read from the partition. Events keep the "
    "version in which they were written.",
    "rejected": "The original bytes of records that are not valid commands, and of undecidable commands.",
    "refusals": "A sample of refused commands, in no certain order, where GRAB_REFUSALS_TOPIC is set. A "
    "record may be repeated, and some may be missing.",
}


def document(version: str) -> Node:
    """The document of a release. It refers to the schema files in the same folder."""
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
    channels = {
        topics.commands: ("commands", ["command", "commands"]),
        topics.operations: ("operations", ["command", "commands"]),
        topics.results: ("results", ["answer"]),
        topics.journal: ("journal", ["block", "marker"]),
        topics.events: ("events", [_message_of(type_) for type_ in CURRENT_VERSIONS]),
        topics.rejected: ("rejected", ["rejected"]),
        topics.refusals: ("refusals", ["refused"]),
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
        for topic, (name, messages) in channels.items()
    }


def _operations() -> Node:
    """The operations from grabstream's point of view: it receives commands, and sends everything else."""
    sends = {
        name: {"action": "send", "channel": {"$ref": f"#/channels/{name}"}, "summary": summary}
        for name, summary in (
            ("journal", "Blocks of events from a shard's outbox, written by the relay that owns the shard."),
            ("events", "Every event as a single record, for programs that do not read the journal."),
            ("rejected", "Records that could not be decided."),
            ("refusals", "Refused commands of some users, for programs that watch demand."),
        )
    }
    receives = {
        name: {
            "action": "receive",
            "channel": {"$ref": f"#/channels/{channel}"},
            "summary": summary,
            "reply": {
                "channel": {"$ref": "#/channels/results"},
                "messages": [{"$ref": "#/channels/results/messages/answer"}],
            },
        }
        for name, channel, summary in (
            ("decide", "commands", "Decides commands; those of one record in their order."),
            ("operate", "operations", "Decides commands of operators, which do not wait behind grabs."),
        )
    }
    return {**receives, **sends}


# -- messages ------------------------------------------------------------------------------------------------


def _messages() -> Node:
    any_command = {"oneOf": [_file(f"commands/{tag_of(command)}") for command in get_args(AnyCommand)]}
    return {
        "command": _message("one command", _schema(any_command), _key("any; the offer's id is usual")),
        "commands": _message(
            "several commands, decided in order; an invalid command does not stop the others",
            _schema({"type": "array", "items": any_command}),
            _key("any; the offer's id is usual"),
        ),
        "answer": _message(
            "the answer to a command", _schema(_file(ANSWER)), _key("the command's id", ID_PATTERN)
        ),
        "block": {
            **_message(
                "consecutive events of a shard, one per line (NDJSON)",
                _schema({"type": "string", "minLength": 1}),
                None,
            ),
            "contentType": "application/x-ndjson",
            "headers": _schema(BLOCK_HEADERS),
            # Grants and holds are runs; other events are lines as on the topic of events.
            "x-lines": {
                "oneOf": [
                    *(_file(event_name(tag_of(event))) for event in get_args(LineEvent)),
                    *(_file(run_name(tag_of(run))) for run in get_args(AnyRun)),
                ]
            },
        },
        "marker": {
            **_message(
                "the start of a term; its value is empty", _schema({"type": "string", "maxLength": 0}), None
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
        "refused": _message(
            "a command that was refused", _schema(_file(REFUSED)), _key("the offer's id", ID_PATTERN)
        ),
    }


def _event(type_: str) -> Node:
    versions = range(FIRST_VERSION, CURRENT_VERSIONS[type_] + 1)
    names = [event_name(type_, version) for version in versions]
    files = list(map(_file, names))
    type_headers = {
        "ce_type": {"const": type_},
        "ce_dataschema": {**_DATASCHEMA, "enum": list(map(schema_id, names))},
    }
    headers = {**EVENT_HEADERS, "properties": {**EVENT_HEADERS["properties"], **type_headers}}
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


# -- headers, whose values are text --------------------------------------------------------------------------


def _headers(required: Node, optional: Node | None = None) -> Node:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


_NUMBER: Final = {"type": "string", "pattern": "^[0-9]+$"}
_HASH: Final = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_TERM: Final = {
    "shard": _NUMBER,
    "term": {**_NUMBER, "description": "raised by each takeover of the shard"},
    "owner": {"type": "string", "description": "a random id of the takeover"},
}
_SIGNATURE: Final = {
    "key": {"type": "string", "pattern": ID_PATTERN, "description": "the id of the key that signed"},
    "sig": {"type": "string", "pattern": "^[0-9a-f]{128}$", "description": "an Ed25519 signature"},
}
MARKER_HEADERS: Final = _headers(
    {**_TERM, "count": {"const": "0"}},
    {
        "first_seq": {**_NUMBER, "description": "of an anchor: the seq after the last one that counts"},
        "head": {**_HASH, "description": "of an anchor: the chain's hash there"},
        **_SIGNATURE,
    },
)
BLOCK_HEADERS: Final = _headers(
    {
        **_TERM,
        "first_seq": _NUMBER,
        "count": {"type": "string", "pattern": "^[1-9][0-9]*$"},
        "prev": {**_HASH, "description": "the chain's hash before the first line"},
        "head": {**_HASH, "description": "the chain's hash after the last line"},
    },
    {
        "seqs": {
            "type": "string",
            "pattern": "^[1-9][0-9]*$",
            "description": "how many seqs the lines take, if some are runs of grabs; absent: one each",
        },
        **_SIGNATURE,
    },
)
_DATASCHEMA: Final = {
    "type": "string",
    "description": "the `$id` of the schema of the value; records of version 0.1 have no such header",
}
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
    {
        "ce_dataschema": _DATASCHEMA,
        "cursor": {
            "type": "string",
            "description": "the publisher's position, on some records; readers ignore it",
        },
    },
)
REJECTED_HEADERS: Final = _headers(
    {
        "reason": {"type": "string"},
        "topic": {"type": "string"},
        "partition": _NUMBER,
        "offset": _NUMBER,
        "index": {
            **_NUMBER,
            "description": "ordinal of the first command within the record that is not valid, from 0",
        },
    },
    {
        "withheld": {
            **_NUMBER,
            "description": "length of bytes that may contain a secret, and are not copied",
        },
        "piece": {
            **_NUMBER,
            "description": "ordinal of the piece, from 1, when the bytes are too long for one record",
        },
        "pieces": {
            **_NUMBER,
            "description": "number of pieces, when the bytes are too long for one record",
        },
        "part": {
            "const": "key",
            "description": "the bytes are the original key, which was too long to be this record's key",
        },
    },
)
