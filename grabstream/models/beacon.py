"""A public randomness beacon in the parts of an envelope, in the form of drand (https://drand.love): rounds
at fixed times, each a joint signature of many parties, whose SHA-256 is the randomness of the round.

An envelope names a chain and a future round. Its seed is committed to before the round exists, and the parts
follow from both, so neither the chooser of the seed nor the parties of the beacon can choose them.
"""

import re
from hashlib import sha256
from typing import Final, NamedTuple

from grabstream.models.bounds import quoted
from grabstream.models.money import Invalid

BEACON_PATTERN: Final = "^[0-9a-f]{64}/[1-9][0-9]{0,11}$"
#: Signatures of BLS12-381 have 48 or 96 bytes.
RANDOMNESS_PATTERN: Final = "^[1-9][0-9]{0,11}/[0-9a-f]{64}/([0-9a-f]{96}|[0-9a-f]{192})$"
_is_beacon = re.compile(BEACON_PATTERN.replace("$", r"\Z")).match
_is_randomness = re.compile(RANDOMNESS_PATTERN.replace("$", r"\Z")).match


class Chain(NamedTuple):
    """A chain of rounds: round 1 came at `genesis_ms` (ms since 1970 UTC), the others every `period_ms`."""

    name: str
    genesis_ms: int
    period_ms: int

    def at(self, number: int) -> int:
        """When a round comes, in ms since 1970 UTC."""
        return self.genesis_ms + (number - 1) * self.period_ms


#: The chains of the League of Entropy, by their hash. The hash covers the public key and these times.
CHAINS: Final = {
    "52db9ba70e0cc0f6eaf7803dd07447a1f5477735fd3f661792ba94600c84e971": Chain(
        "quicknet", 1_692_803_367_000, 3_000
    ),
    "8990e7a9aaed2ffed73dbd7092123d6f289930540d7651336225dc172e51b2ce": Chain(
        "default", 1_595_431_050_000, 30_000
    ),
}


class Beacon(NamedTuple):
    """The round of a chain that an envelope awaits."""

    chain: str
    number: int

    @property
    def at(self) -> int:
        """When the round comes, in ms since 1970 UTC."""
        return CHAINS[self.chain].at(self.number)

    @property
    def address(self) -> str:
        """The public address of the round."""
        return f"https://api.drand.sh/{self.chain}/public/{self.number}"


class Round(NamedTuple):
    """A round of a beacon: its number, randomness (32 bytes) and signature, both in lower-case hex."""

    number: int
    randomness: str
    signature: str


def beacon_of(text: str) -> Beacon:
    """Reads `<hash of the chain>/<round>`; raises Invalid when it has another form, or an unknown chain."""
    if not _is_beacon(text):
        raise Invalid(f"must be <hash of the chain>/<number of the round>, got {quoted(text)}")
    chain, _, number = text.partition("/")
    if chain not in CHAINS:
        known = ", ".join(f"{hash_} ({known.name})" for hash_, known in CHAINS.items())
        raise Invalid(f"chain {chain} is not known; there are {known}")
    return Beacon(chain, int(number))


def round_of(text: str) -> Round:
    """Reads `<round>/<randomness>/<signature>`; raises Invalid when it has another form, or the randomness is
    not the SHA-256 of the signature.
    """
    if not _is_randomness(text):
        raise Invalid(
            "must be <number of the round>/<randomness>/<signature>, as the beacon gives them in lower-case "
            f"hexadecimal; got {quoted(text)}"
        )
    number, randomness, signature = text.split("/")
    if sha256(bytes.fromhex(signature)).hexdigest() != randomness:
        raise Invalid("the randomness is not the SHA-256 of the signature: copy both from one round")
    return Round(int(number), randomness, signature)


def mixed(seed: str, randomness: str | None) -> str:
    """What the parts of an envelope are drawn from: its seed, with the randomness of its beacon if it has
    one.
    """
    return seed if randomness is None else f"{seed}:{randomness}"
