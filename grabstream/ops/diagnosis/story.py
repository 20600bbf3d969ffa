"""The history of one user in one offer: attempts, answers and later events in order, with how late each was
and what it changed in the counters of limits.
"""

from typing import Any, NamedTuple

import msgspec

from grabstream.models.events import (
    AnyEvent,
    GrabExtended,
    GrabGranted,
    GrabHeld,
    GrabQueued,
    GrabReturned,
    OfferClosed,
    OfferOpened,
    OfferPaused,
    OfferRetired,
    PaymentRefundDue,
    encode_event,
)
from grabstream.models.identifiers import campaign_of
from grabstream.ops.diagnosis.counters import Counted, LimitCounters
from grabstream.ops.diagnosis.evidence import BooksEvidence, is_about


class Moment(NamedTuple):
    """An event or a refusal: `what` is the event's type or the outcome. `late_ms` is how long after the time
    that decided against it (the last unit, the close, the deadline) it arrived, negative when it arrived
    before; `late_behind` names that time. `limits` are (counter before, counter after).
    """

    at: int
    since_opening_ms: int
    what: str
    refused: bool
    command: str
    grab: str | None
    details: dict[str, Any]
    late_ms: int | None
    late_behind: str | None
    limits: list[tuple[Counted, Counted]]


def describe(evidence: BooksEvidence) -> list[Moment]:
    """The moments in order. A command that was refused and made an event is one moment, that of the event."""
    return _OfferStory(evidence).describe()


class _OfferStory:
    def __init__(self, evidence: BooksEvidence) -> None:
        self._evidence = evidence
        self._offer: str = evidence.offer["offer"]
        self._opens_at: int = evidence.offer["opens_at"]
        self._counters = LimitCounters()
        self._attributes: dict[str, str] = {}
        self._deadlines: dict[str, int] = {}
        self._paused_at: int | None = None
        self._closed_at: int | None = None
        self._moments: list[Moment] = []

    def describe(self) -> list[Moment]:
        evidence = self._evidence
        self._attributes = next((grab["attributes"] for grab in evidence.grabs if grab["attributes"]), {})
        with_events = {event.command for event in evidence.events}
        refusals = [refusal for refusal in evidence.refusals if refusal["command"] not in with_events]
        # Within one ms events come first: the refusal was decided on the state after them.
        for _, _, event, refusal in sorted(
            [(event.at, event.seq, event, None) for event in evidence.events]
            + [(refusal["at"], 1 << 62, None, refusal) for refusal in refusals],
            key=lambda entry: entry[:2],
        ):  # fmt: skip
            if event is not None:
                self._add_event(event)
            elif refusal is not None:
                self._add_refusal(refusal)
        return self._moments

    def _add_event(self, event: AnyEvent) -> None:
        is_of_user = event.offer == self._offer and self._is_about_user(event)
        before = self._counted(event.at) if is_of_user else []
        self._counters.feed(event)
        if event.offer != self._offer:
            return
        if isinstance(event, OfferPaused):
            self._paused_at = event.at
        elif isinstance(event, OfferClosed):
            self._closed_at = event.at
        if is_of_user:
            late = self._lateness_of(event)
            if isinstance(event, GrabHeld | GrabExtended):
                self._deadlines[event.grab] = event.deadline_at
            pairs = [
                (old, new) for old, new in zip(before, self._counted(event.at), strict=True) if old != new
            ]
            self._add(
                event.at,
                _type_of(event),
                False,
                event.command,
                getattr(event, "grab", None),
                _details(event),
                late,
                pairs,
            )
        elif not isinstance(event, OfferRetired | GrabGranted | GrabHeld | GrabQueued) and _type_of(
            event
        ).startswith("offer."):
            self._add(event.at, _type_of(event), False, event.command, None, _details(event), None, [])

    def _is_about_user(self, event: AnyEvent) -> bool:
        return is_about(event, self._evidence.user, {grab["grab"] for grab in self._evidence.grabs})

    def _counted(self, at: int) -> list[Counted]:
        return self._counters.at(self._offer, self._evidence.user, self._attributes, at)

    def _lateness_of(self, event: AnyEvent) -> tuple[int, str] | None:
        """How long after its hold's deadline a payment arrived that could not be served; None for other
        events.
        """
        if (
            isinstance(event, PaymentRefundDue)
            and event.outcome == "expired"
            and event.grab in self._deadlines
        ):
            return event.at - self._deadlines[event.grab], "the deadline"
        return None

    def _add_refusal(self, refusal: dict[str, Any]) -> None:
        kept = ("quantity", "retry_at", "limit_name", "limit_left", "units_left", "message", "type")
        details = {name: refusal[name] for name in kept if refusal[name] is not None}
        # Only grabs are counted, so only their refusals show the counters.
        pairs = (
            [(counted, counted) for counted in self._counted(refusal["at"])]
            if refusal["type"] == "grab"
            else []
        )
        late = self._lateness_of_refusal(refusal)
        self._add(
            refusal["at"], refusal["outcome"], True, refusal["command"], refusal["grab"], details, late, pairs
        )

    def _lateness_of_refusal(self, refusal: dict[str, Any]) -> tuple[int, str] | None:
        at, outcome = refusal["at"], refusal["outcome"]
        if outcome == "not_open_yet":
            return at - (refusal["retry_at"] or self._opens_at), "the opening"
        since = {
            "over": (self._closed_at or self._evidence.offer["closes_at"], "the close"),
            "sold_out": (self._evidence.sold_out_at.get(at), "the last unit was taken"),
            "on_hold": (self._paused_at, "the pause"),
            "expired": (self._deadlines.get(refusal["grab"] or ""), "the deadline"),
        }.get(outcome)
        return None if since is None or since[0] is None else (at - since[0], since[1])

    def _add(
        self, at: int, what: str, refused: bool, command: str, grab: str | None, details: dict[str, Any],
        late: tuple[int, str] | None,
        limits: list[tuple[Counted, Counted]],
    ) -> None:  # fmt: skip
        late_ms, after_what = late or (None, None)
        self._moments.append(
            Moment(
                at, at - self._opens_at, what, refused, command, grab, details, late_ms, after_what, limits
            )
        )


def _type_of(event: AnyEvent) -> str:
    return str(event.__struct_config__.tag)


#: Fields that every event has or that a moment has itself, and fields that are secret or too long.
_HIDDEN = frozenset(
    {
        "v",
        "shard",
        "offer",
        "at",
        "command",
        "grab",
        "user",
        "digest",
        "codes",
        "voided_codes",
        "sealed_seed",
        "offsets",
        "terms",
        "type",
    }
)


def _details(event: AnyEvent) -> dict[str, Any]:
    # Decoded from the event's text, since a field may hold raw JSON.
    fields: dict[str, Any] = msgspec.json.decode(encode_event(event))
    if isinstance(event, OfferOpened):
        return {"seq": event.seq, "total": event.total, "campaign": campaign_of(event.offer)}
    details = {name: value for name, value in fields.items() if name not in _HIDDEN}
    if isinstance(event, GrabReturned) and event.voided_codes:
        details["codes_voided"] = len(event.voided_codes)
    return details
