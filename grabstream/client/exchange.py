"""Requests to a gateway and the meaning of their replies, without I/O: shared by both clients over HTTP.

A request may be repeated, because a command has the same id each time. Waits between attempts grow, with full
jitter (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/), and are never shorter than
`Retry-After`.
"""

import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import quote

from pydantic import Field, TypeAdapter

from grabstream.models.error_words import error_in_words
from grabstream.models.identifiers import id_of_end_user
from grabstream.models.outcomes import Outcome, OutcomeUnknown
from grabstream.models.retry_after import retry_after_seconds
from grabstream.models.vocabulary import Answer, AnyCommand, Command, Grab, GrabCommand
from grabstream.models.vocabulary.documents import Document

#: The wait before an attempt, at most, unless the gateway asks for more: it doubles from FIRST to MAX.
PAUSE_SECONDS_FIRST: Final = 0.1
PAUSE_SECONDS_MAX: Final = 5.0
#: The shortest time that an attempt gets.
ATTEMPT_SECONDS_MIN: Final = 0.05
USER_AGENT: Final = "grabstream-client"
#: Statuses below 500 of requests that may succeed when they are repeated.
_PASSING: Final = frozenset({408, 425, 429})
#: Of these statuses, the problem of a gateway says that nothing was decided. A proxy may send them for a
#: request that the gateway has decided.
_UNDECIDED: Final = frozenset({408, 425, 429, 503})
_UNEXPECTED: Final = "unexpected_reply"
#: How the types of all problems of a gateway begin. Other servers send problem details, too.
_PROBLEMS: Final = "/problems/"
#: Waits that a server asks for are cut to this.
_RETRY_AFTER_SECONDS_MAX: Final = 99_999.0
#: Commands whose path is that of the offer, with the method and what follows.
_OFFER_PATHS: Final = {
    "amend": ("PATCH", ""),
    "load": ("POST", "/loads"),
    "adjust": ("POST", "/adjustments"),
    "pause": ("POST", "/pause"),
    "resume": ("POST", "/resume"),
    "close": ("POST", "/close"),
    "grab": ("POST", "/grabs"),
}
_GRAB_COMMANDS: Final = frozenset({"confirm", "release", "extend", "return", "redeem", "unredeem"})

T = TypeVar("T")
D = TypeVar("D", bound=Document)


def pause_seconds(attempt: int) -> float:
    """A random pause before an attempt: the longest one doubles with each that has failed."""
    return random.uniform(0.0, min(PAUSE_SECONDS_MAX, PAUSE_SECONDS_FIRST * 2 ** min(attempt, 16)))


class RequestProblem(Exception):
    """The gateway refused a request, or did not serve it within the timeout; no command was decided.

    `status` is that of HTTP, 0 without a reply. `type` is the last part of the type of the problem details,
    `detail` its words, and `field` the field, header or parameter to correct.
    """

    def __init__(self, status: int, type: str, detail: str, field: str | None = None) -> None:
        super().__init__(f"{type}: {detail}")
        self.status = status
        self.type = type
        self.detail = detail
        self.field = field


class ClientRequest(NamedTuple):
    """A request: path and query, and for a command its body and id."""

    method: str
    path: str
    query: Mapping[str, str] = {}
    body: bytes | None = None
    key: str | None = None

    def headers(self) -> dict[str, str]:
        """The headers in addition to those of the client."""
        if self.key is None:
            return {}
        return {"Idempotency-Key": self.key, "Content-Type": "application/json"}


class Exchange(Generic[T]):
    """One question or command, over all attempts of it.

    `after_reply` and `after_error` take the result of an attempt. They return the seconds to wait before the
    next one, or None when `result` is there. They raise RequestProblem for a request that the gateway refuses
    permanently, and OutcomeUnknown if an earlier attempt may have been decided.
    """

    result: T

    def __init__(self, request: ClientRequest) -> None:
        self.request = request
        self._attempts = 0
        #: Whether an attempt may have been decided without a reply.
        self._is_unknown = False
        self._last: RequestProblem | None = None

    def after_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> float | None:
        """Reads a reply."""
        if 200 <= status < 300:
            try:
                self.result = self._read(body)
                return None
            except ValueError as error:  # also that of pydantic, and of JSON
                problem = not_from_a_gateway(status, self.request, str(error))
                members: Mapping[str, Any] = {}
        else:
            problem, members = _problem_of(status, self.request, body)
        is_odd = problem.type == _UNEXPECTED
        if status in _PASSING or status >= 500:
            self._is_unknown = self._is_unknown or is_odd or status not in _UNDECIDED
            self._last = problem
            asked = retry_after_seconds(headers.get("retry-after", ""), time.time(), _RETRY_AFTER_SECONDS_MAX)
            return self._pause_seconds(asked)
        # A reply that no gateway sent, refusal or success, says nothing about the command: a proxy may also
        # refuse a response on its way back.
        self._is_unknown = self._is_unknown or is_odd
        try:
            if self._refused(problem, members):
                return None
        except ValueError as error:  # also that of pydantic
            self._is_unknown = True
            problem = not_from_a_gateway(status, self.request, str(error))
        raise self._unknown(str(problem)) or problem

    def after_error(self, error: Exception, was_sent: bool) -> float:
        """After an attempt without a reply; `was_sent`: the gateway may have got the request."""
        self._is_unknown = self._is_unknown or was_sent
        self._last = RequestProblem(0, "no_reply", error_in_words(error))
        return self._pause_seconds(0.0)

    def given_up(self, seconds: float) -> Exception:
        """The error after the last attempt."""
        last = self._last or RequestProblem(0, "no_reply", "the time ran out before the first attempt")
        words = f"no answer within {seconds:g} s, after {self._attempts} attempts; the last one: {last}"
        return self._unknown(words) or RequestProblem(last.status, last.type, words, last.field)

    def _unknown(self, words: str) -> OutcomeUnknown | None:
        """The error when an attempt may have been decided; None if it is known that none was."""
        if not self._is_unknown or self.request.key is None:
            return None
        return OutcomeUnknown(
            f"{words}. It is unknown whether the command was decided: send it again with the id "
            f"{self.request.key}"
        )

    def _read(self, body: bytes) -> T:
        raise NotImplementedError

    def _refused(self, problem: RequestProblem, members: Mapping[str, Any]) -> bool:
        """Takes a refusal as the result, if it is one; raises ValueError for one that is malformed, or is of
        another command.
        """
        return False

    def _pause_seconds(self, asked_seconds: float) -> float:
        # The jitter is added to what the gateway asks for, so that its clients do not return together.
        pause = asked_seconds + pause_seconds(self._attempts)
        self._attempts += 1
        return pause


class ServedAnswer(Answer, frozen=True):
    """An answer of a gateway."""

    payment_token: str | None = Field(
        None,
        description="Of a hold, if the gateway has payment keys: what the buyer takes to the payment side.",
    )


class Asking(Exchange[D]):
    """A question; its result is a document."""

    def __init__(self, path: str, document: type[D], asked: Mapping[str, Any]) -> None:
        super().__init__(ClientRequest("GET", path, {name: _text_of(value) for name, value in asked.items()}))
        self._document = document

    def _read(self, body: bytes) -> D:
        # A newer gateway may have more fields.
        return self._document.model_validate_json(body, extra="ignore")


class Deciding(Exchange[ServedAnswer]):
    """A command; its result is its answer, also when it is refused."""

    def __init__(self, command: AnyCommand) -> None:
        super().__init__(_request_of(command))
        self._command = command

    def _read(self, body: bytes) -> ServedAnswer:
        return self._own(ServedAnswer.model_validate_json(body))

    def _own(self, answer: ServedAnswer) -> ServedAnswer:
        """The answer, if it is to this command; raises ValueError otherwise."""
        command = self._command
        # For an end user, the gateway makes the id of a command about a grab.
        user = command.user if isinstance(command, GrabCommand) else None
        if answer.id != command.id and (user is None or answer.id != id_of_end_user(user, command.id)):
            raise ValueError(f"the answer is to the command {answer.id}, not to {command.id}")
        return answer

    def _refused(self, problem: RequestProblem, members: Mapping[str, Any]) -> bool:
        if "outcome" not in members or "code" not in members:
            return False
        if self._is_unknown and members["outcome"] == Outcome.invalid.name:
            # An attempt before may have been decided by a gateway of another release.
            return False
        command = self._command
        user = command.user if isinstance(command, Grab | GrabCommand) else None
        ours = {"id": command.id, "offer": command.offer} | ({"user": user} if user else {})
        self.result = self._own(ServedAnswer.model_validate({**ours, **members, "message": problem.detail}))
        return True


_answers_of_basket: Final = TypeAdapter(tuple[ServedAnswer, ...])


class TakingBasket(Exchange[tuple[ServedAnswer, ...]]):
    """A basket; its result is the answers of its grabs, in their order, also when it is refused."""

    def __init__(self, grabs: Sequence[Grab], key: str) -> None:
        bodies = [
            {name: value for name, value in _fields_of(grab).items() if name not in ("type", "id", "basket")}
            for grab in grabs
        ]
        super().__init__(
            ClientRequest("POST", "/v1/baskets", {}, json.dumps({"grabs": bodies}).encode(), key)
        )

    def _read(self, body: bytes) -> tuple[ServedAnswer, ...]:
        members = json.loads(body)
        return self._own(members.get("answers") if isinstance(members, dict) else ())

    def _refused(self, problem: RequestProblem, members: Mapping[str, Any]) -> bool:
        if "answers" not in members:
            return False
        self.result = self._own(members["answers"])
        return True

    def _own(self, documents: Any) -> tuple[ServedAnswer, ...]:
        """The answers, if they are to the grabs of this basket; raises ValueError otherwise."""
        answers = _answers_of_basket.validate_python(documents)
        for answer in answers:
            if answer.id.rpartition(".")[0] != self.request.key:
                raise ValueError(
                    f"the answer is to the grab {answer.id}, not of the basket {self.request.key}"
                )
        return answers


def path_of(*parts: str) -> str:
    """A path under /v1. Raises ValueError for an id that no path can name."""
    for part in parts:
        if part in ("", ".", ".."):
            raise ValueError(f"{part!r} cannot be part of a path; choose another id")
    return "/v1/" + "/".join(quote(part, safe=":") for part in parts)


def _request_of(command: AnyCommand) -> ClientRequest:
    fields = _fields_of(command)
    type_ = fields.pop("type")
    if fields.get("basket") is not None:
        raise ValueError("basket: use take_basket for grabs of a basket")
    key = fields.pop("id")
    if type_ == "open":
        path_of(command.offer)
        return ClientRequest("POST", "/v1/offers", {}, json.dumps(fields).encode(), key)
    offer = fields.pop("offer")
    if type_ in _GRAB_COMMANDS:
        path = f"{path_of('offers', offer, 'grabs', fields.pop('grab'))}/{type_}"
        return ClientRequest("POST", path, {}, json.dumps(fields).encode(), key)
    method, rest = _OFFER_PATHS[type_]
    return ClientRequest(method, path_of("offers", offer) + rest, {}, json.dumps(fields).encode(), key)


def _fields_of(command: Command) -> dict[str, Any]:
    """The fields of a command in JSON, where those with their default are left out."""
    fields: dict[str, Any] = json.loads(command.model_dump_json())
    return fields


def _text_of(value: Any) -> str:
    """A parameter of a query; an answer stands for its event."""
    return f"{value.shard}-{value.seq}" if isinstance(value, Answer) else str(value)


def _problem_of(status: int, request: ClientRequest, body: bytes) -> tuple[RequestProblem, Mapping[str, Any]]:
    """The problem of a reply, and its members. A proxy may have made the reply."""
    try:
        members = json.loads(body)
    except ValueError:
        members = None
    if not isinstance(members, dict) or not str(members.get("type")).startswith(_PROBLEMS):
        return not_from_a_gateway(status, request, body[:200].decode(errors="replace")), {}
    name = members["type"].rpartition("/")[2]
    return RequestProblem(status, name, str(members.get("detail", "")), members.get("field")), members


def not_from_a_gateway(status: int, request: ClientRequest, text: str) -> RequestProblem:
    """The problem of a reply that a gateway would not send."""
    return RequestProblem(
        status,
        _UNEXPECTED,
        f"{request.method} {request.path} got {status}, not from a gateway: {text}",
    )
