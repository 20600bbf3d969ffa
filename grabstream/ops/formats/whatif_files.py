"""Files of `whatif`, in YAML or JSON: the offers, the stretch of history, and the changed terms."""

from typing import Any, Final, NamedTuple

from grabstream.models.bounds import quoted
from grabstream.models.identifiers import campaign_of, is_id
from grabstream.models.whatif.twins import FIXED_TERMS, TermChange
from grabstream.ops.formats.moments import BadMoment, parse_time
from grabstream.ops.formats.offer_files import BadOfferFile, Form, read_terms
from grabstream.ops.formats.strict_text import UnreadableText, read_strictly

_KNOWN: Final = ("offer", "campaign", "from", "until", "terms")
#: The most offers that a file names.
OFFERS_MAX: Final = 1_000


class WhatIf(NamedTuple):
    """The request of a file: the changed terms of offers of a campaign, and the end of the history (ms since
    1970 UTC; None: at its newest event).
    """

    campaign: str
    change: TermChange
    until: int | None


def read_whatif(text: str, form: Form) -> WhatIf:
    """The content of a file; raises BadOfferFile with all problems."""
    if form == "csv":
        raise BadOfferFile([("file", "is not CSV: write it in YAML or JSON")])
    try:
        written = read_strictly(text.removeprefix("\ufeff"), form == "json")
    except UnreadableText as error:
        raise BadOfferFile([(error.place, error.reason)]) from None
    if not isinstance(written, dict):
        raise BadOfferFile([("file", "must be an object with offer or campaign, and terms")])
    reasons = [
        f"{quoted(str(name))}: there is no such field; use {', '.join(_KNOWN)}"
        for name in written
        if name not in _KNOWN
    ]
    campaign, offers = _offers(written, reasons)
    since, until = (_time(name, written.get(name), reasons) for name in ("from", "until"))
    if since is not None and until is not None and since > until:
        reasons.append("from: is after until, so nothing would change")
    terms, wrong = read_terms(written.get("terms", {}))
    reasons += wrong
    reasons += [f"terms.{name}: cannot change" for name in terms if name in FIXED_TERMS]
    if reasons:
        raise BadOfferFile([("file", reason) for reason in reasons])
    return WhatIf(campaign, TermChange(terms, offers, since), until)


def _offers(written: dict[str, Any], reasons: list[str]) -> tuple[str, frozenset[str]]:
    given = written.get("offer", [])
    offers = [given] if isinstance(given, str) else given
    campaign = written.get("campaign")
    if not isinstance(offers, list) or not all(isinstance(offer, str) and is_id(offer) for offer in offers):
        reasons.append("offer: must be the id of an offer, or a list of ids")
        return "", frozenset()
    if len(offers) > OFFERS_MAX:
        reasons.append(f"offer: at most {OFFERS_MAX:,} offers; leave it out and give the campaign for all")
    if campaign is not None and not (isinstance(campaign, str) and is_id(campaign) and ":" not in campaign):
        reasons.append("campaign: must be the id of a campaign: what stands before the first : of its offers")
        return "", frozenset()
    campaigns = {*map(campaign_of, offers), *([campaign] if campaign else [])}
    if not campaigns:
        reasons.append("offer: is missing; give an offer, or a campaign for all of its offers")
        return "", frozenset()
    if len(campaigns) > 1:
        reasons.append(f"offer: all must be of one campaign, these are of {', '.join(sorted(campaigns))}")
    return min(campaigns), frozenset(offers)


def _time(name: str, value: Any, reasons: list[str]) -> int | None:
    if value is None:
        return None
    try:
        return parse_time(str(value))
    except BadMoment as error:
        reasons.append(f"{name}: {error}")
        return None
