"""Answers: what a command's sender is told. What does not apply is absent."""

from typing import Annotated, get_args

import msgspec

from grabstream.models.bounds import shortened
from grabstream.models.calendar import Period
from grabstream.models.identifiers import Count, Id, in_schema
from grabstream.models.money import Currency, Sum
from grabstream.models.outcomes import NOT_DECIDED, OUTCOME_NAMES, Outcome, OutcomeName


class LimitState(msgspec.Struct, omit_defaults=True, frozen=True):
    """What a limit leaves to a user: `left` of `max` until `resets_at` (ms since 1970 UTC; absent: it never
    does).
    """

    by: Id
    per: Annotated[str, in_schema(enum=list(get_args(Period)))]
    max: Sum
    left: Sum
    resets_at: Count | None = None
    scope: Annotated[str, in_schema(enum=["offer", "campaign"])] = "offer"


class Answer(msgspec.Struct, omit_defaults=True, frozen=True):
    """The answer to one command.

    `code` is the outcome's number. `amount` counts the offer's asset (minor units or pieces), `place` is the
    how-manieth grab of the offer this is, `left` what was left after it (units: parts or pieces). `seq` is
    the event's number in its shard. `due` minor units of `currency` are to be paid until `deadline_at`.
    `limit` is the one that refused, `limits` what all of them leave. `retry_at`, `deadline_at` and `at` are
    milliseconds since 1970 UTC.
    """

    id: Id
    outcome: OutcomeName
    code: Annotated[int, in_schema(enum=list(OUTCOME_NAMES))]
    offer: Id | None = None
    grab: Id | None = None
    amount: Sum | None = None
    quantity: Sum | None = None
    place: Count | None = None
    left: Sum | None = None
    repeated: bool = False
    retry_at: Count | None = None
    shard: Count | None = None
    seq: Count | None = None
    at: Count | None = None
    message: str | None = None
    deadline_at: Count | None = None
    due: Sum | None = None
    currency: Currency | None = None
    limit: LimitState | None = None
    limits: tuple[LimitState, ...] = ()
    coupon_code: str | None = None
    coupon_codes: tuple[str, ...] = ()

    @property
    def positive(self) -> bool:
        """Whether the command was carried out."""
        return self.code < Outcome.invalid

    @property
    def decided(self) -> bool:
        """Whether a script decided it; `fenced` and `busy` say: not yet, send it again."""
        return self.code not in NOT_DECIDED


def refusal(
    id: str,
    outcome: Outcome,
    offer: str | None = None,
    message: str | None = None,
    retry_at: int | None = None,
) -> Answer:
    """A refusal made without a script (the door, the queue, the fence); its message is bounded, whatever it
    quotes.
    """
    said = None if message is None else shortened(message)
    return Answer(id, OUTCOME_NAMES[outcome], int(outcome), offer, retry_at=retry_at, message=said)


encode_answer = msgspec.json.Encoder().encode
decode_answer = msgspec.json.Decoder(Answer).decode
