"""Options of a replay or of a view of the past, checked and converted to a request."""

from collections.abc import Sequence
from typing import NamedTuple

import click

from grabstream.models.identifiers import campaign_of, is_id, shard_of
from grabstream.ops.formats.moments import BadMoment, parse_points
from grabstream.ops.settings import Settings
from grabstream.streams.history.chunks import Point
from grabstream.streams.replaying.replay import Stretch
from grabstream.streams.replaying.replay_schema import Definition
from grabstream.streams.replaying.selection import Wanted


class Request(NamedTuple):
    """What to replay, and from which source (`journal` or `audit`)."""

    source: str
    stretches: tuple[Stretch, ...]
    wanted: Wanted

    def definition(self, settings: Settings) -> Definition:
        """The request as it is recorded in the schema of a bounded replay."""
        until = {stretch.shard: stretch.last for stretch in self.stretches if stretch.last is not None}
        shards = tuple(stretch.shard for stretch in self.stretches)
        return Definition(settings.prefix, self.source, shards, self.wanted, until)


def request(
    settings: Settings, source: str, first: Sequence[str], last: Sequence[str], shards: Sequence[int],
    offers: Sequence[str],
    users: Sequence[str],
) -> Request:  # fmt: skip
    """The request that the options ask for; raises UsageError that names the option and the way out."""
    for option, names in (("--offer", offers), ("--user", users)):
        for name in names:
            if not is_id(name):
                raise click.UsageError(
                    f"{option} {name!r} is not an id: use 1 to 64 of the characters A-Z a-z 0-9 . _ : -"
                )
    for shard in shards:
        if shard >= settings.shards:
            raise click.UsageError(
                f"--shard {shard}: the system has {settings.shards} shards, 0 to {settings.shards - 1}"
            )
    chosen = sorted(
        {shard_of(campaign_of(offer), settings.shards) for offer in offers}
        or set(shards)
        or set(range(settings.shards))
    )
    if offers and shards and set(chosen) != set(shards):
        raise click.UsageError(
            f"--shard: the offers are in {', '.join(map(str, chosen))}; leave out --shard, --offer is enough"
        )
    try:
        begin = parse_points("--from", first, chosen, settings.shards, offers)
        end = parse_points("--until", last, chosen, settings.shards, offers)
    except BadMoment as error:
        raise click.UsageError(str(error)) from None
    for shard in chosen:
        _check_order(shard, begin.get(shard), end.get(shard))
    stretches = tuple(Stretch(shard, begin.get(shard), end.get(shard)) for shard in chosen)
    return Request(source, stretches, Wanted(tuple(sorted(set(offers))), tuple(sorted(set(users)))))


def _check_order(shard: int, first: Point | None, last: Point | None) -> None:
    if first is None or last is None or (first.seq is None) != (last.seq is None):
        return
    if first.value > last.value:
        raise click.UsageError(f"--from is after --until in shard {shard}: no event lies between them")
