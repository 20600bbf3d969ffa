"""Amounts for people: the decimals of currencies, and nothing rounded."""

import pytest

from grabstream.models.currencies import DECIMALS, shown_amount, shown_number
from grabstream.models.money import AMOUNT_MAX


@pytest.mark.parametrize(
    ("amount", "asset", "shown"),
    [
        (9_900, "CNY", "99.00 CNY"),
        (5, "CNY", "0.05 CNY"),
        (0, "EUR", "0.00 EUR"),
        (-1_234_567, "USD", "-12,345.67 USD"),
        (-5, "USD", "-0.05 USD"),
        (9_900, "JPY", "9,900 JPY"),
        (9_900, "KWD", "9.900 KWD"),
        (9_900, "CLF", "0.9900 CLF"),
        (9_900, "XTS", "9,900 minor units of XTS"),
        (9_900, "ABC", "9,900 minor units of ABC"),
        (3, "sku:phone", "3 sku:phone"),
        (1_200, "coupon:CNY", "1,200 coupon:CNY"),
        (AMOUNT_MAX * 10**6 + 1, "CNY", "100,000,000,000,000,000.01 CNY"),
    ],
)
def test_an_amount_is_shown_exactly(amount: int, asset: str, shown: str) -> None:
    assert shown_amount(amount, asset) == shown
    assert shown.startswith(shown_number(amount, asset))


def test_every_code_has_one_number_of_decimals() -> None:
    assert len(DECIMALS) == 165
    assert all(len(code) == 3 and code.isupper() for code in DECIMALS)
    assert (DECIMALS["CNY"], DECIMALS["JPY"], DECIMALS["BHD"]) == (2, 0, 3)
