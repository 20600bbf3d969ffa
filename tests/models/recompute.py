"""Independent code that computes every part of an envelope from its events `offer.opened` and `offer.closed`.
It does not import grabstream.
"""

from hashlib import sha1, sha256


def recompute(opened: dict, closed: dict, amended: dict | None = None) -> list[int]:
    """The parts by place. With draw `at_grab`, these include parts that no user has drawn. `amended` is the
    event `offer.amended` that gave the randomness of a beacon.
    """
    terms, seed = opened["terms"], closed["seed"]
    assert sha256(bytes.fromhex(seed)).hexdigest() == opened["seed_sha256"], (
        "not the seed that was committed to"
    )
    if amended is not None:
        _, randomness, signature = amended["changes"]["randomness"].split("/")
        assert sha256(bytes.fromhex(signature)).hexdigest() == randomness
        seed = f"{seed}:{randomness}"

    def draw(k: int, size: int) -> int:
        attempt = 0
        while (
            number := int(sha1(f"{seed}:{k}:{attempt}".encode()).hexdigest()[:13], 16)
        ) >= 16**13 // size * size:
            attempt += 1
        return number % size

    left, n, law = terms["total"], terms["parts"], terms.get("law", "double_mean")
    low, high = terms.get("min", 1), terms.get("max", terms["total"])
    parts = []
    for place in range(1, n + 1):
        q, r, rest = left // (n - place + 1), left % (n - place + 1), n - place
        width = {"equal": 0, "double_mean": q - low}.get(
            law, min(q - max(low, left - rest * high), min(high, left - rest * low) - q - (r > 0))
        )
        number = draw(place, (2 * width + 1) * (rest + 1)) if rest else 0
        parts.append(left if rest == 0 else q - width + number // (rest + 1) + (number % (rest + 1) < r))
        left -= parts[-1]
    if terms.get("draw", "ahead") == "ahead":
        for k, last in enumerate(range(n, 1, -1), n + 1):
            other = draw(k, last)
            parts[last - 1], parts[other] = parts[other], parts[last - 1]
    return parts
