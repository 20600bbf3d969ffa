"""`closes_at` must be after `opens_at`. The value 0 is not treated as absent."""

import pytest

from grabstream.models.commands import Undecodable, decode_command
from grabstream.models.money import Invalid
from grabstream.models.offers import CouponTerms, EnvelopeTerms, StockTerms, Terms, check_terms

ENVELOPE = EnvelopeTerms(issuer="shop", total=10, parts=2, asset="CNY", funding="pay-1", closes_at=0)


@pytest.mark.parametrize(
    "terms",
    [
        StockTerms(issuer="shop", total=1, closes_at=0),
        CouponTerms(issuer="shop", total=1, closes_at=0),
        ENVELOPE,
    ],
)
def test_closes_at_0_is_invalid_and_not_absent(terms: Terms) -> None:
    with pytest.raises(Invalid, match="terms.closes_at: must be after opens_at"):
        check_terms(terms)


def test_decode_command_refuses_closes_at_0() -> None:
    terms = b'{"kind": "stock", "issuer": "shop", "total": 1, "opens_at": 0, "closes_at": 0}'
    raw = b'{"type": "open", "id": "o", "offer": "o", "terms": ' + terms + b"}"
    with pytest.raises(Undecodable, match="terms.closes_at: must be after opens_at"):
        decode_command(raw)


def test_opens_at_0_opens_at_once_and_may_close_at_1() -> None:
    check_terms(StockTerms(issuer="shop", total=1, opens_at=0, closes_at=1))
