"""Answers: the result of a command, as its sender gets it. A field that does not apply is absent."""

from typing import Annotated, get_args

import msgspec

from grabstream.models.bounds import shortened
from grabstream.models.calendar import Period
from grabstream.models.identifiers import Count, Id, in_schema
from grabstream.models.money import Currency, Sum
from grabstream.models.outcomes import NOT_DECIDED, OUTCOME_NAMES, Outcome, OutcomeName


class LimitState(msgspec.Struct, omit_defaults=True, frozen=True):
    """What a limit leaves to a user: `left` of `max` units until `resets_at` (milliseconds since 1970 UTC;
    absent: the limit never resets).
    """

    by: Id
    per: Annotated[str, in_schema(enum=list(get_args(Period)))]
    max: Sum
    left: Sum
    resets_at: Count | None = None
    scope: Annotated[str, in_schema(enum=["offer", "campaign"])] = "offer"


# Answers and grabs are many, and never part of a cycle: Python's collector need not look at them.
class Answer(msgspec.Struct, omit_defaults=True, frozen=True, gc=False):
    """The answer to one command. `user` is the user that the command names, always for a grab: it is
    identified by `offer`, `user` and `id`.

    `code` is the number of `outcome`. `amount` counts the offer's asset (minor units or pieces), `place` is
    the ordinal of the grab within the offer, from 1, `left` the parts or pieces that can be taken after it.
    `seq` is the event's number in `shard`. `due` minor units of `currency` are to be paid until
    `deadline_at`. `limit` is the limit that refused the command, `limits` what all limits leave. `retry_at`,
    `deadline_at` and `at` are milliseconds since 1970 UTC. `voided_codes` are the codes of returned units,
    which are void. `metadata` is that of a grab that was granted, held or queued.
    """

    id: Id
    outcome: OutcomeName
    code: Annotated[int, in_schema(enum=list(OUTCOME_NAMES))]
    offer: Id | None = None
    user: Id | None = None
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
    voided_codes: tuple[str, ...] = ()
    metadata: dict[Id, str] | None = None

    @property
    def positive(self) -> bool:
        """Whether the command was executed."""
        return self.code < Outcome.invalid

    @property
    def decided(self) -> bool:
        """Whether the command was decided; after `fenced` or `busy` it may be sent again."""
        return self.code not in NOT_DECIDED


def without_codes(answer: Answer) -> Answer:
    """Removes coupon codes from an answer. A coupon number, which is removed too, is also in `place`."""
    if answer.coupon_code is None and not answer.voided_codes:
        return answer
    return msgspec.structs.replace(answer, coupon_code=None, coupon_codes=(), voided_codes=())


def refusal(
    id: str,
    outcome: Outcome,
    offer: str | None = None,
    message: str | None = None,
    retry_at: int | None = None,
    user: str | None = None,
) -> Answer:
    """A refusal without a script (by an input check, a full queue, or a fence). A long message is cut."""
    bounded = None if message is None else shortened(message)
    return Answer(id, OUTCOME_NAMES[outcome], int(outcome), offer, user, retry_at=retry_at, message=bounded)


encode_answer = msgspec.json.Encoder().encode
decode_answer = msgspec.json.Decoder(Answer).decode
