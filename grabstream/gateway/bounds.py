"""Bounds of the gateway that are not settings. `docs/bounds.md` names each with its value."""

from typing import Final

from grabstream.models.bounds import BASKET_GRABS_MAX
from grabstream.models.identifiers import ID_LENGTH_MAX

#: The request line and all headers of a request.
HEAD_BYTES_MAX: Final = 16 * 1024
#: The headers of a request. As objects, many short ones need fifty times their bytes.
HEADERS_MAX: Final = 100
#: The body of a grab: a ticket, attributes, metadata, and ids.
GRAB_BODY_BYTES_MAX: Final = 16 * 1024
#: Maximum size of a request, without its head: the largest body, and the frames of its chunks.
MESSAGE_BYTES_MAX: Final = 512 * 1024
#: The query of a request, and its parameters.
QUERY_BYTES_MAX: Final = 2 * 1024
QUERY_PARAMETERS_MAX: Final = 16
#: Queries that came a moment ago, which are not parsed again, and targets whose answers are kept; and the
#: longest of them.
PARSED_MAX: Final = 4_096
PARSED_BYTES_MAX: Final = 256
#: Heads of answers, and values of the header Host, that are kept as bytes and as names.
HEADS_KEPT_MAX: Final = 1_024
HOSTS_KEPT_MAX: Final = 256
#: From the first byte of a request to its last one.
READ_SECONDS_MAX: Final = 10.0
#: From the first byte of an answer to the time at which the client has taken all of it.
WRITE_SECONDS_MAX: Final = 10.0
#: How long a connection may stay open between two requests.
IDLE_SECONDS_MAX: Final = 30
#: Requests of a connection that wait until the one before them is answered.
PIPELINE_MAX: Final = 8
#: Requests of a connection that are answered from memory, without a task, when they arrive together.
ANSWERED_AT_ONCE: Final = 64
#: How long a stopping gateway waits for requests in progress.
DRAIN_SECONDS_MAX: Final = 12
#: Connections whose bytes are read in one turn of the event loop; the others wait for the next turn.
READ_AT_ONCE: Final = 64
#: Connections that wait until the gateway accepts them.
BACKLOG: Final = 2_048
#: Connections that are accepted in one turn of the event loop.
ACCEPTED_AT_ONCE: Final = 16
#: The key of a basket: the ids of its grabs are the key, a dot, and their number.
BASKET_KEY_LENGTH_MAX: Final = ID_LENGTH_MAX - 1 - len(str(BASKET_GRABS_MAX))
#: When to try again after the gateway itself had no room, or after what may be over in a moment.
RETRY_SOON_SECONDS: Final = 1
#: Commands in progress have their own bound: at first FIRST, fewer while commands take longer than the
#: target, more while they do not, never fewer than MIN.
COMMAND_SECONDS_TARGET: Final = 0.5
COMMANDS_MIN: Final = 50
COMMANDS_FIRST: Final = 400
#: Questions in progress, of the requests in progress; of these, those of one end user, and of another caller
#: (an API key; an address, without authentication); and those that wait for a session of PostgreSQL.
QUESTIONS_MAX: Final = 200
QUESTIONS_USER_MAX: Final = 10
QUESTIONS_CALLER_MAX: Final = 100
#: Questions that wait for an answer which is being made for another one: in sum, and of one API key or
#: address (of one end user, QUESTIONS_USER_MAX). They do not count for the bounds above.
JOINED_MAX: Final = 2_000
JOINED_CALLER_MAX: Final = 1_000
SESSION_WAITERS_MAX: Final = 100
SESSION_WAIT_SECONDS_MAX: Final = 2.0
#: How long PostgreSQL works on one question.
QUESTION_MS_MAX: Final = 2_000
#: Time of a change of webhooks in PostgreSQL (ms): up to 100,000 parked events are sent again at once.
CHANGE_MS_MAX: Final = 10_000
#: Offers of a webhook whose events are listed.
WEBHOOK_OFFERS_MAX: Final = 100
#: How long a question waits until the read model has an event (`after`).
AFTER_SECONDS_MAX: Final = 5.0
#: Questions that wait so, of the questions in progress; and those of one caller.
AFTER_WAITERS_MAX: Final = 100
AFTER_WAITERS_CALLER_MAX: Final = 25
#: Rows of a page.
PAGE_ROWS_MAX: Final = 100
PAGE_ROWS: Final = 20
CURSOR_LENGTH_MAX: Final = 400
#: How long an answer about an offer, or a list of offers, is kept for others; and the memory for them.
CACHE_SECONDS: Final = 2.0
CACHE_BYTES_MAX: Final = 32 * 1024 * 1024
#: Offers that match a question for a random order: they are read once for all visitors, and the gateway puts
#: them into the order of each; of more, it has the names of the newest ones, and reads those of a page. And
#: such lists that are kept ready for it.
SHUFFLED_OFFERS_MAX: Final = 500
SHUFFLED_NAMES_MAX: Final = 10_000
SHUFFLED_LISTS_MAX: Final = 16
#: Grabs of a waiting list whose positions are reported.
WAITING_POSITIONS_MAX: Final = 10_000
#: How often changed positions are sent to streams of users; the waiting grabs of a user whose positions are
#: sent; and users whose grabs are looked up at once.
POSITIONS_SECONDS: Final = 2.0
STREAM_WAITS_MAX: Final = 20
WAITERS_LOOKED_UP_MAX: Final = 200
#: A list that was read is not read again for this many times as long as the read took, at most for this long;
#: and the longest pause after PostgreSQL has refused a list, or a user, again and again.
POSITIONS_REST_TIMES: Final = 20
POSITIONS_REST_SECONDS_MAX: Final = 10.0
POSITIONS_FAILED_SECONDS_MAX: Final = 60.0
#: How much longer an answer in the cache Redis is used while a gateway makes the next one; how long a gateway
#: waits for the answer that another one makes; and the largest answer that is shared.
CACHE_STALE_SECONDS_MAX: Final = 2.0
CACHE_WAIT_SECONDS_MAX: Final = 0.5
SHARED_ANSWER_BYTES_MAX: Final = 256 * 1024
#: Streams of events; how long each lasts, and how often it shows that it lives.
STREAMS_MAX: Final = 1_000
#: Of these, streams that begin at the same time, and those of one end user; questions about what was missed.
STREAMS_JOINING_MAX: Final = 200
STREAMS_USER_MAX: Final = 10
STREAMS_READING_MAX: Final = 8
STREAM_SECONDS_MAX: Final = 300.0
STREAM_HEARTBEAT_SECONDS: Final = 15.0
#: How often a stream checks that its key or token is still valid.
STREAM_ADMISSION_SECONDS: Final = 1.0
#: What a stream has not sent yet, and all streams together; a stream that cannot take more is ended.
STREAM_BYTES_MAX: Final = 1024 * 1024
STREAMS_BYTES_MAX: Final = 64 * 1024 * 1024
#: Events that a stream reads when it resumes: of its offer; of all offers in the stream of a user.
STREAM_MISSED_SEQS_MAX: Final = 100_000
#: How often the API keys are read again, and how long the last known ones are valid while they cannot be.
KEYS_EVERY_SECONDS: Final = 2.0
KEYS_STALE_SECONDS_MAX: Final = 3_600.0
#: The longest time after which a revocation holds in every gateway, while PostgreSQL answers.
REVOCATION_SECONDS_MAX: Final = 5.0
#: A token of an end user, before it is decoded.
TOKEN_BYTES_MAX: Final = 4 * 1024
#: The maximum difference between the clocks of the issuer of tokens and of the gateway.
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
#: The window of `/v1/demand`, in seconds, and the events of a shard that are read for it at once.
DEMAND_SECONDS: Final = 60
DEMAND_SECONDS_MAX: Final = 300
DEMAND_EVENTS_MAX: Final = 50_000
#: Recoveries, differences and sums in a document about the system.
SYSTEM_ROWS_MAX: Final = 50
BOOK_SUMS_MAX: Final = 1_000
#: Questions in progress that connect to servers themselves (`why`, `doctor`), and how long one may take.
EXAMINATIONS_MAX: Final = 4
EXAMINATION_SECONDS_MAX: Final = 40.0
#: Frames and grabs of the film of an offer.
FILM_FRAMES: Final = 120
FILM_GRABS: Final = 50
#: Parts of an offer, the first by place, whose fairness is measured; intervals of parts, groups of places.
FAIRNESS_GRABS_MAX: Final = 20_000
FAIRNESS_BINS: Final = 20
FAIRNESS_GROUPS: Final = 10
#: Parts that are drawn to show the law of an envelope; of one that has more, only the mean is shown.
FAIRNESS_DRAWS_MAX: Final = 20_000
