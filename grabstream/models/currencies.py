"""Amounts for people: money in major units of its currency, where ISO 4217 says how many minor units one has.

Everything for programs has integers. An amount whose currency is not known here stays in minor units, and
says so.
"""

from collections.abc import Mapping
from typing import Final

#: Currencies by the number of their decimals, after "List one" of ISO 4217, published on 2026-01-01 by its
#: maintenance agency (https://www.six-group.com/en/products-services/financial-information/data-standards.html).
#: Codes without minor units (metals, XDR, XTS …) are left out.
_BY_DECIMALS: Final[Mapping[int, str]] = {
    0: "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF",
    2: (
        "AED AFN ALL AMD AOA ARS AUD AWG AZN BAM BBD BDT BMD BND BOB BOV BRL BSD BTN BWP BYN BZD CAD CDF CHE "
        "CHF CHW CNY COP COU CRC CUP CVE CZK DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD GTQ GYD "
        "HKD HNL HTG HUF IDR ILS INR IRR JMD KES KGS KHR KPW KYD KZT LAK LBP LKR LRD LSL MAD MDL MGA MKD MMK "
        "MNT MOP MRU MUR MVR MWK MXN MXV MYR MZN NAD NGN NIO NOK NPR NZD PAB PEN PGK PHP PKR PLN QAR RON RSD "
        "RUB SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP STN SVC SYP SZL THB TJS TMT TOP TRY TTD TWD TZS UAH "
        "USD USN UYU UZS VED VES WST XAD XCD XCG YER ZAR ZMW ZWG"
    ),
    3: "BHD IQD JOD KWD LYD OMR TND",
    4: "CLF UYW",
}
#: How many decimals the major unit of a currency has.
DECIMALS: Final[Mapping[str, int]] = {
    code: decimals for decimals, codes in _BY_DECIMALS.items() for code in codes.split()
}


def shown_number(amount: int, asset: str) -> str:
    """An amount in words that stand next to its asset, as in a column: `99.00` of CNY, `9,900 minor units` of
    a currency that is not known, `3` pieces.
    """
    if ":" in asset:
        return f"{amount:,}"
    decimals = DECIMALS.get(asset)
    if decimals is None:
        return f"{amount:,} minor units"
    # Not by division of floats, which are inexact from 2^53 on.
    whole, rest = divmod(abs(int(amount)), 10**decimals)
    sign = "-" if amount < 0 else ""
    return f"{sign}{whole:,}" + (f".{rest:0{decimals}}" if decimals else "")


def shown_amount(amount: int, asset: str) -> str:
    """The same with its asset: `99.00 CNY`, `9,900 minor units of XTS`, `3 sku:phone`."""
    of = " of" if ":" not in asset and asset not in DECIMALS else ""
    return f"{shown_number(amount, asset)}{of} {asset}"
