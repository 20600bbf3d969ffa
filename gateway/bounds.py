"""Bounds of the gateway that are no settings. `docs/limits.md` is generated from these numbers."""

from typing import Final

from grabstream.models.bounds import BASKET_GRABS_MAX
from grabstream.models.identifiers import ID_LENGTH_MAX

#: The request line and all headers of a request.
HEAD_BYTES_MAX: Final = 16 * 1024
#: The body of a grab: a ticket, attributes, metadata, and ids.
GRAB_BODY_BYTES_MAX: Final = 16 * 1024
#: What a request may have in all, beside its head: the largest body, and the frames of its chunks.
MESSAGE_BYTES_MAX: Final = 512 * 1024
#: The query of a request, and its parameters.
QUERY_BYTES_MAX: Final = 2 * 1024
QUERY_PARAMETERS_MAX: Final = 16
#: From the first byte of a request to its last one.
READ_SECONDS_MAX: Final = 10.0
#: From the first byte of an answer to the time at which the client has taken all of it.
WRITE_SECONDS_MAX: Final = 10.0
#: How long a connection may stay open between two requests.
IDLE_SECONDS_MAX: Final = 30
#: Requests of a connection that wait until the one before them is answered.
PIPELINE_MAX: Final = 64
#: How long the gateway waits for requests in work when it is stopped.
DRAIN_SECONDS_MAX: Final = 12
#: Connections that wait until the gateway accepts them.
BACKLOG: Final = 2_048
#: The key of a basket: the ids of its grabs are the key, a dot, and their number.
BASKET_KEY_LENGTH_MAX: Final = ID_LENGTH_MAX - 1 - len(str(BASKET_GRABS_MAX))
#: When to try again after the gateway itself had no room, or after what may be over in a moment.
RETRY_SOON_SECONDS: Final = 1
#: Questions in work, of the requests in work; and those that wait for a session of PostgreSQL.
QUESTIONS_MAX: Final = 200
SESSION_WAITERS_MAX: Final = 100
SESSION_WAIT_SECONDS_MAX: Final = 2.0
#: How long PostgreSQL works on one question.
QUESTION_MS_MAX: Final = 2_000
#: How long a question waits until the read model has an event (`after`).
AFTER_SECONDS_MAX: Final = 5.0
#: Questions that wait so, of the questions in work.
AFTER_WAITERS_MAX: Final = 100
#: Rows of a page.
PAGE_ROWS_MAX: Final = 100
PAGE_ROWS: Final = 20
CURSOR_LENGTH_MAX: Final = 400
#: How long an answer about an offer, or a list of offers, is kept for others; and the memory for them.
CACHE_SECONDS: Final = 2.0
CACHE_BYTES_MAX: Final = 32 * 1024 * 1024
#: How often the API keys are read again, and how long the last known ones are valid while they cannot be.
KEYS_EVERY_SECONDS: Final = 2.0
KEYS_STALE_SECONDS_MAX: Final = 3_600.0
#: The longest time after which a revocation holds in every gateway, while PostgreSQL answers.
REVOCATION_SECONDS_MAX: Final = 5.0
#: A token of an end user, before it is decoded.
TOKEN_BYTES_MAX: Final = 4 * 1024
#: How far the clock of the issuer of tokens may be ahead of, or behind, that of the gateway.
TOKEN_LEEWAY_SECONDS: Final = 5
#: Tokens whose signature was verified, which need not be verified again.
TOKENS_REMEMBERED_MAX: Final = 16_384
#: The key set of the issuer of tokens (JWKS), its keys, and how long reading it takes.
KEY_SET_BYTES_MAX: Final = 256 * 1024
KEY_SET_KEYS_MAX: Final = 100
KEY_SET_SECONDS_MAX: Final = 3.0
#: How often the key set is read again: always, and for tokens that are signed by an unknown key.
KEY_SET_EVERY_SECONDS: Final = 60.0
KEY_SET_UNKNOWN_SECONDS_MIN: Final = 10.0
#: Callers that one gateway counts in its memory, for each kind of rate.
CALLERS_COUNTED_MAX: Final = 50_000
#: How long the cache Redis may take for one answer, and its connections.
CACHE_SERVER_SECONDS_MAX: Final = 0.25
CACHE_SERVER_CONNECTIONS_MAX: Final = 64
