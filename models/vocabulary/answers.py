"""Answers: the result of a command, as its sender gets it. A field that does not apply is absent."""

from grabstream.models import answers as wire
from grabstream.models.outcomes import NOT_DECIDED, Outcome
from grabstream.models.vocabulary.base import Flag, Model, Text, Whole, Wired, omitted


class LimitState(Model, Wired[wire.LimitState], extra="ignore", frozen=True):
    """What a limit leaves to a user: `left` of `max` units until `resets_at` (milliseconds since 1970 UTC;
    absent: the limit never resets).
    """

    by: Text
    per: Text
    max: Whole
    left: Whole
    resets_at: Whole | None = omitted(None)
    scope: Text = omitted("offer")


class Answer(Model, Wired[wire.Answer], extra="ignore", frozen=True):
    """The answer to one command. Unknown fields are ignored, so that readers survive newer writers. `user` is
    the user that the command names, of a grab always: a grab is identified by `offer`, `user` and `id`.

    `code` is the number of `outcome`. `amount` counts the offer's asset (minor units or pieces), `place` is
    the ordinal of the grab within the offer, from 1, `left` the parts or pieces that can be taken after it.
    `seq` is the event's number in `shard`. `due` minor units of `currency` are to be paid until
    `deadline_at`. `limit` is the limit that refused the command, `limits` what all limits leave. `retry_at`,
    `deadline_at` and `at` are milliseconds since 1970 UTC. `voided_codes` are the codes of returned units:
    nobody may use them. `metadata` is that of a grab that was granted, held or queued.
    """

    id: Text
    outcome: Text
    code: Whole
    offer: Text | None = omitted(None)
    user: Text | None = omitted(None)
    grab: Text | None = omitted(None)
    amount: Whole | None = omitted(None)
    quantity: Whole | None = omitted(None)
    place: Whole | None = omitted(None)
    left: Whole | None = omitted(None)
    repeated: Flag = omitted(False)
    retry_at: Whole | None = omitted(None)
    shard: Whole | None = omitted(None)
    seq: Whole | None = omitted(None)
    at: Whole | None = omitted(None)
    message: Text | None = omitted(None)
    deadline_at: Whole | None = omitted(None)
    due: Whole | None = omitted(None)
    currency: Text | None = omitted(None)
    limit: LimitState | None = omitted(None)
    limits: tuple[LimitState, ...] = omitted(())
    coupon_code: Text | None = omitted(None)
    coupon_codes: tuple[Text, ...] = omitted(())
    voided_codes: tuple[Text, ...] = omitted(())
    metadata: dict[Text, Text] | None = omitted(None)

    @property
    def positive(self) -> bool:
        """Whether the command was carried out."""
        return self.code < Outcome.invalid

    @property
    def decided(self) -> bool:
        """Whether the command was decided; after `fenced` or `busy` it may be sent again."""
        return self.code not in NOT_DECIDED
