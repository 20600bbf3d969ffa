"""The story of one user and one offer: attempts and what became of them, in order, with how late each was and
what limits had left.
"""

from typing import Any, NamedTuple

import msgspec

from grabstream.models.events import (
    AnyEvent,
    GrabExtended,
    GrabGranted,
    GrabHeld,
    GrabQueued,
    OfferClosed,
    OfferOpened,
    OfferPaused,
    OfferRetired,
    PaymentRefundDue,
    encode_event,
)
from grabstream.models.identifiers import campaign_of
from grabstream.ops.diagnosis.counters import Counted, Counters
from grabstream.ops.diagnosis.evidence import Evidence


class Moment(NamedTuple):
    """Something that happened: `what` is an outcome or an event's type. `late_ms`: behind the moment that
    decided against it (the last unit, the close, the deadline), negative when it came too early. `limits` are
    (counter before, counter after).
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


def tell(evidence: Evidence) -> list[Moment]:
    """The moments of the story, in order; an attempt that made an event and was refused is one."""
    return _Teller(evidence).tell()


class _Teller:
    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._offer: str = evidence.offer["offer"]
        self._opens_at: int = evidence.offer["opens_at"]
        self._counters = Counters()
        self._attributes: dict[str, str] = {}
        self._deadlines: dict[str, int] = {}
        self._paused_at: int | None = None
        self._closed_at: int | None = None
        self._moments: list[Moment] = []

    def tell(self) -> list[Moment]:
        evidence = self._evidence
        self._attributes = next((grab["attributes"] for grab in evidence.grabs if grab["attributes"]), {})
        with_events = {event.command for event in evidence.events}
        refusals = [one for one in evidence.refusals if one["command"] not in with_events]
        # At the same ms the event comes first: what it left is what the refusal met.
        for _, _, event, refusal in sorted(
            [(event.at, event.seq, event, None) for event in evidence.events]
            + [(one["at"], 1 << 62, None, one) for one in refusals],
            key=lambda found: found[:2],
        ):  # fmt: skip
            if event is not None:
                self._take(event)
            elif refusal is not None:
                self._refused(refusal)
        return self._moments

    def _take(self, event: AnyEvent) -> None:
        is_own = event.offer == self._offer and self._is_about_user(event)
        before = self._counted(event.at) if is_own else []
        self._counters.feed(event)
        if event.offer != self._offer:
            return
        if isinstance(event, OfferPaused):
            self._paused_at = event.at
        elif isinstance(event, OfferClosed):
            self._closed_at = event.at
        if is_own:
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
        names = {grab["grab"] for grab in self._evidence.grabs}
        return getattr(event, "user", None) == self._evidence.user or (
            isinstance(event, PaymentRefundDue) and event.grab in names
        )

    def _counted(self, at: int) -> list[Counted]:
        return self._counters.at(self._offer, self._evidence.user, self._attributes, at)

    def _lateness_of(self, event: AnyEvent) -> tuple[int, str] | None:
        """How late an event's cause came: a payment that could not be served, by its hold's deadline."""
        if (
            isinstance(event, PaymentRefundDue)
            and event.outcome == "expired"
            and event.grab in self._deadlines
        ):
            return event.at - self._deadlines[event.grab], "the deadline"
        return None

    def _refused(self, refusal: dict[str, Any]) -> None:
        kept = ("quantity", "retry_at", "limit_name", "limit_left", "units_left", "message", "type")
        details = {name: refusal[name] for name in kept if refusal[name] is not None}
        # Only a grab is counted; what limits had then is worth telling of it.
        pairs = [(one, one) for one in self._counted(refusal["at"])] if refusal["type"] == "grab" else []
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
            "sold_out": (self._evidence.sold_out_at.get(at), "the last unit went"),
            "on_hold": (self._paused_at, "the pause"),
            "expired": (self._deadlines.get(refusal["grab"] or ""), "the deadline"),
        }.get(outcome)
        return None if since is None or since[0] is None else (at - since[0], since[1])

    def _add(
        self, at: int, what: str, refused: bool, command: str, grab: str | None, details: dict[str, Any],
        late: tuple[int, str] | None,
        limits: list[tuple[Counted, Counted]],
    ) -> None:  # fmt: skip
        late_ms, behind = late or (None, None)
        self._moments.append(
            Moment(at, at - self._opens_at, what, refused, command, grab, details, late_ms, behind, limits)
        )


def _type_of(event: AnyEvent) -> str:
    return str(event.__struct_config__.tag)


#: What every event has, or what is nobody's business here.
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
        "sealed_seed",
        "offsets",
        "terms",
        "type",
    }
)


def _details(event: AnyEvent) -> dict[str, Any]:
    # By its text: an event may hold JSON as it was asked.
    fields: dict[str, Any] = msgspec.json.decode(encode_event(event))
    if isinstance(event, OfferOpened):
        return {"seq": event.seq, "total": event.total, "campaign": campaign_of(event.offer)}
    return {name: value for name, value in fields.items() if name not in _HIDDEN}
