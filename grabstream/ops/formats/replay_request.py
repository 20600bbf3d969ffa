"""Options of a replay or of a view of the past, checked and converted to a request."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from grabstream.extras import installed
from grabstream.models.bounds import counted
from grabstream.models.identifiers import campaign_of, is_id, shard_of
from grabstream.ops.formats.moments import BadMoment, parse_points
from grabstream.settings import Settings
from grabstream.streams.buckets import INSTALL, BadAddress, BucketAddress, is_address, parse
from grabstream.streams.history.chunks import Point
from grabstream.streams.replaying.filters import Filters, filters_of
from grabstream.streams.replaying.replay import Stretch
from grabstream.streams.replaying.replay_schema import ReplayDefinition
from grabstream.streams.replaying.selection import Wanted


class ArchiveAddress(click.Path):
    """A directory, or `s3://bucket/prefix`."""

    def __init__(self, exists: bool) -> None:
        super().__init__(exists=exists, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or the address as text."""
        if not is_address(str(value)):
            return super().convert(value, param, ctx)
        try:
            parse(str(value), needs_key=False)
        except BadAddress as error:
            self.fail(str(error), param, ctx)
        require_store_client(param, ctx)
        return value


class ObjectAddress(click.Path):
    """A file, or `s3://bucket/key`, with `?versionId=ID` for one version."""

    def __init__(self, is_written: bool = False) -> None:
        super().__init__(path_type=Path)
        self._is_written = is_written

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or the parts of the address."""
        if isinstance(value, BucketAddress) or not is_address(str(value)):
            return value if isinstance(value, BucketAddress) else super().convert(value, param, ctx)
        try:
            place = parse(str(value))
        except BadAddress as error:
            self.fail(str(error), param, ctx)
        if place.version and self._is_written:
            self.fail(f"{value}: the store names the version: leave out ?versionId=", param, ctx)
        require_store_client(param, ctx)
        return place


def require_store_client(param: click.Parameter | None, ctx: click.Context | None) -> None:
    """Raises BadParameter where addresses of object stores cannot be used."""
    if not installed("boto3"):
        raise click.BadParameter(f"s3:// needs the extra `s3`: {INSTALL}", ctx=ctx, param=param)


def source_option(words: str, *others: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option that names where events are read: the journal, or one of the `others`."""
    return click.option(
        "--source", type=click.Choice(["journal", *others]), default="journal", show_default=True, help=words
    )


archive_option = click.option(
    "--archive",
    type=ArchiveAddress(exists=True),
    metavar="ARCHIVE",
    help="The archive that `grabstream export` has written: a directory, or s3://bucket/prefix.",
)


class ReplayRequest(NamedTuple):
    """What to replay, and from which source: `journal`, `audit`, or `archive` and where it is. `journal` is
    Kafka's id of the system's journal; empty where it is not known.
    """

    source: str
    stretches: tuple[Stretch, ...]
    wanted: Wanted
    archive: Path | str | None = None
    journal: str = ""

    def definition(self, settings: Settings) -> ReplayDefinition:
        """The request as recorded in the schema of a bounded replay."""
        until = {stretch.shard: stretch.last for stretch in self.stretches if stretch.last is not None}
        shards = tuple(stretch.shard for stretch in self.stretches)
        return ReplayDefinition(settings.prefix, self.source, shards, self.wanted, until)

    def filters(self, settings: Settings) -> Filters:
        """The request as recorded in a file or a topic."""
        first = {stretch.shard: stretch.first for stretch in self.stretches if stretch.first is not None}
        return filters_of(settings.prefix, self.journal, self.wanted, first)


def chosen_shards(settings: Settings, shards: Sequence[int]) -> list[int]:
    """The shards of --shard, by default all; raises UsageError for one that the system does not have."""
    if wrong := [shard for shard in shards if shard >= settings.shards]:
        raise click.UsageError(
            f"--shard {wrong[0]}: the system has {counted(settings.shards, 'shards')}, 0 to "
            f"{settings.shards - 1}"
        )
    return sorted(set(shards)) or list(range(settings.shards))


def request(
    settings: Settings, source: str, first: Sequence[str], last: Sequence[str], shards: Sequence[int],
    offers: Sequence[str],
    users: Sequence[str],
) -> ReplayRequest:  # fmt: skip
    """The request that the options ask for; raises UsageError that names the option and the fix."""
    for option, names in (("--offer", offers), ("--user", users)):
        for name in names:
            if not is_id(name):
                raise click.UsageError(
                    f"{option} {name!r} is not an id: use 1 to 64 of the characters A-Z a-z 0-9 . _ : -"
                )
    chosen = chosen_shards(settings, shards)
    if offers:
        chosen = sorted({shard_of(campaign_of(offer), settings.shards) for offer in offers})
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
    return ReplayRequest(source, stretches, Wanted(tuple(sorted(set(offers))), tuple(sorted(set(users)))))


def require_archive(option: str, source: str, archive: Path | str | None) -> None:
    """Raises UsageError unless an archive is given exactly when an archive is the source."""
    if source == "archive" and archive is None:
        raise click.UsageError(
            f"{option} archive: name it with --archive: a directory, or s3://bucket/prefix"
        )
    if source != "archive" and archive is not None:
        raise click.UsageError(f"--archive is only for {option} archive")


def _check_order(shard: int, first: Point | None, last: Point | None) -> None:
    if first is None or last is None or (first.seq is None) != (last.seq is None):
        return
    if first.value > last.value:
        raise click.UsageError(f"--from is after --until in shard {shard}: no event lies between them")
