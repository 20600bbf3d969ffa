"""The state of every shard in Redis: its position, its relay, and why it decides nothing."""

from typing import Any

from grabstream.connections.redis_servers import ANSWER_SECONDS_MAX, ask_each, information
from grabstream.lua.keys import SHARD_FIELDS, KeySpace, ShardKeys


async def read_shards(redis: Any, keys: KeySpace, shards: int) -> list[dict[str, Any]]:
    """A row for each shard. Raises an error of Redis when no server answers; rows of a server that does not
    answer while others do say so.
    """
    states = {number: keys.shard(number).state for number in range(shards)}
    rows = await ask_each(redis, states, lambda number: _shard(redis, keys.shard(number)))
    return [rows.get(number) or _unknown(number) for number in states]


async def _shard(redis: Any, keys: ShardKeys) -> dict[str, Any]:
    values = [value and value.decode() for value in await redis.hmget(keys.state, list(SHARD_FIELDS))]
    fields = dict(zip(SHARD_FIELDS, values, strict=True))
    holder = await redis.get(keys.lease)
    seq, journaled = int(fields["seq"] or 0), int(fields["journaled_seq"] or 0)
    [(server, server_epoch)] = (await _server_epochs(redis, keys.state)).items()
    fault = fields["fault"] or _why_fenced(fields["server_epoch"], server_epoch)
    if fault is None and holder is None:
        fault = "no relay: start a worker"
    return {
        "shard": keys.shard, "seq": seq, "journaled_seq": journaled, "waiting": seq - journaled,
        "time": int(fields["time"] or 0), "term": int(fields["term"] or 0),
        "relay": holder and holder.decode(errors="replace"), "fault": fault, "server": server,
    }  # fmt: skip


def _unknown(number: int) -> dict[str, Any]:
    """The row of a shard whose server does not answer, while others do."""
    nothing = dict.fromkeys(("seq", "journaled_seq", "waiting", "time", "term", "relay"))
    return {
        "shard": number,
        **nothing,
        "fault": f"its server does not answer within {ANSWER_SECONDS_MAX:.0f} s",
        "server": "",
    }


async def _server_epochs(redis: Any, key: str) -> dict[str, str]:
    """The address of the server that has a key, and its server epoch."""
    servers, replications = (
        await information(redis, "server", key),
        await information(redis, "replication", key),
    )
    return {
        server: info["run_id"] + replications[server]["master_replid"] for server, info in servers.items()
    }


def _why_fenced(reconciled: str | None, server_epoch: str) -> str | None:
    if reconciled is None:
        return "no relay has taken this shard over yet: start a worker"
    return (
        None
        if reconciled == server_epoch
        else "Redis has restarted, and no relay has reconciled the shard since: start a worker"
    )
