"""The progress of the verifier in SQL: the verified position of each shard, the expected state of every
account and offer there, and the findings.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection

from grabstream.projections.checking.proof import LedgerRow, OfferState
from grabstream.projections.database.arrays import integer_array, text_array
from grabstream.projections.ledger import in_lines

#: After this time without a pass, and without a verifier that has the lock, no verifier runs.
SILENT_MS_MAX: Final = 300_000
#: After this time without a pass, the verifier that has the lock does not get on. A pass of a large system,
#: and the rest after it (REST_SECONDS_MAX of streams/projecting/verifier.py), take less.
UNFINISHED_MS_MAX: Final = 3_600_000
#: The shard of findings about all shards: those about accounts of users.
ALL_SHARDS: Final = -1


def lock_of(schema: str) -> str:
    """The advisory lock of PostgreSQL that the one verifier of a system has while it works."""
    return f"grabstream-verifier-{schema}"


class VerifiedTo(NamedTuple):
    """The verified position of a shard (`seq`), and that of the current repeated round (`again_seq`), each
    with the hash of the chain there.
    """

    shard: int
    seq: int
    head: bytes
    again_seq: int
    again_head: bytes
    rounds: int
    gaps: Sequence[int]
    compared_at: datetime | None


class OpenFinding(NamedTuple):
    """A difference that existed when it was last checked."""

    id: int
    kind: str
    shard: int
    subject: str
    seq: int | None
    what: str
    found_at: datetime

    @property
    def where(self) -> str:
        """The shard as the start of a message; empty for a finding about all shards."""
        return "" if self.shard == ALL_SHARDS else f"shard {self.shard}: "


class RecordedProblem(NamedTuple):
    """A difference to record: its subject, its description, and its seq, if it has one."""

    subject: str
    what: str
    seq: int | None = None


class AccountRow(NamedTuple):
    """An account: its sum in the ledger, the expected sum, and the balance of its user in `balances` (None:
    do not compare).
    """

    account: str
    asset: str
    posted: int
    expected: int
    balance: int | None


# -- progress ------------------------------------------------------------------------------------------------


async def progress(connection: AsyncConnection[Any]) -> dict[int, VerifiedTo]:
    """The progress of every shard."""
    rows = await connection.execute(
        "SELECT shard, seq, head, again_seq, again_head, rounds, gaps, compared_at "
        "FROM verified ORDER BY shard"
    )
    return {
        shard: VerifiedTo(shard, seq, bytes(head), again, bytes(again_head), *rest)
        for shard, seq, head, again, again_head, *rest in await rows.fetchall()
    }


async def begin(connection: AsyncConnection[Any], shards: int) -> None:
    """Adds the rows of shards that have none."""
    await connection.execute(
        "INSERT INTO verified (shard) SELECT generate_series(0, %s - 1) ON CONFLICT DO NOTHING", (shards,)
    )


async def reset_progress(connection: AsyncConnection[Any]) -> None:
    """Starts verification from the beginning, because the events of the read models are no longer those
    verified.
    """
    await connection.execute("DELETE FROM verified_accounts")
    await connection.execute("DELETE FROM verified_offers")
    await connection.execute(
        "UPDATE verified SET seq = DEFAULT, head = DEFAULT, again_seq = DEFAULT, again_head = DEFAULT"
    )


async def set_gaps(connection: AsyncConnection[Any], shard: int, ids: Sequence[int]) -> None:
    """Stores the ids of the records set aside with which the shard is then verified."""
    await connection.execute("UPDATE verified SET gaps = %s WHERE shard = %s", (list(ids), shard))


async def move(connection: AsyncConnection[Any], shard: int, seq: int, head: bytes) -> None:
    """Records that a shard is verified up to `seq`."""
    await connection.execute(
        "UPDATE verified SET seq = %s, head = %s, verified_at = now() WHERE shard = %s", (seq, head, shard)
    )


async def move_again(
    connection: AsyncConnection[Any], shard: int, seq: int, head: bytes, round_done: bool
) -> None:
    """Records the progress of the repeated round, or its end."""
    await connection.execute(
        "UPDATE verified SET again_seq = %s, again_head = %s, rounds = rounds + %s WHERE shard = %s",
        (0 if round_done else seq, bytes(32) if round_done else head, int(round_done), shard),
    )


async def record_pass(connection: AsyncConnection[Any]) -> None:
    """Records the end of a pass over all shards."""
    await connection.execute("UPDATE verified SET compared_at = now()")


# -- rows to verify ----------------------------------------------------------------------------------------


async def ledger_rows(
    connection: AsyncConnection[Any], shard: int, after_seq: int, to_seq: int
) -> list[LedgerRow]:
    """The transfers in a range of seqs."""
    lines = in_lines("%(after)s", "%(to)s")
    rows = await connection.execute(
        "SELECT seq, leg, offer, asset, debit, credit, amount, at FROM transfers "  # noqa: S608 - no input
        f"WHERE shard = %(shard)s AND {lines} AND seq > %(after)s AND seq <= %(to)s",
        {"shard": shard, "after": after_seq, "to": to_seq},
    )
    return [LedgerRow(*row) for row in await rows.fetchall()]


async def add_accounts(connection: AsyncConnection[Any], changes: Mapping[tuple[str, str], int]) -> None:
    """Adds changes to the expected sums of accounts."""
    keys = sorted(changes)
    await connection.execute(
        "INSERT INTO verified_accounts AS a (account, asset, posted) "
        "SELECT * FROM unnest(%s::text[], %s::text[], %s::numeric[]) "
        "ON CONFLICT (account, asset) DO UPDATE SET posted = a.posted + excluded.posted",
        (
            text_array([key[0] for key in keys]),
            text_array([key[1] for key in keys]),
            integer_array([changes[key] for key in keys]),
        ),
    )


_OFFER_COLUMNS: Final = "offer, shard, offer_seq, seq, amount_left, units_left, held, grabs, retired"


async def offer_states(connection: AsyncConnection[Any], offers: Sequence[str]) -> dict[str, OfferState]:
    """The expected states of offers."""
    rows = await connection.execute(
        # The columns are those above.
        f"SELECT {_OFFER_COLUMNS} FROM verified_offers WHERE offer = ANY(%s)",  # noqa: S608
        (list(offers),),
    )
    return {row[0]: OfferState(*row) for row in await rows.fetchall()}


async def save_offers(connection: AsyncConnection[Any], states: Iterable[OfferState]) -> None:
    """Writes the expected states of offers."""
    columns = [list(column) for column in zip(*states, strict=True)]
    if not columns:
        return
    await connection.execute(
        f"INSERT INTO verified_offers ({_OFFER_COLUMNS}) "  # noqa: S608 - the columns are those above
        "SELECT * FROM unnest(%s::text[], %s::integer[], %s::bigint[], %s::bigint[], %s::bigint[], "
        "%s::bigint[], %s::bigint[], %s::bigint[], %s::boolean[]) "
        "ON CONFLICT (offer) DO UPDATE SET offer_seq = excluded.offer_seq, seq = excluded.seq, "
        "amount_left = excluded.amount_left, units_left = excluded.units_left, held = excluded.held, "
        "grabs = excluded.grabs, retired = excluded.retired",
        columns,
    )


# -- comparing -----------------------------------------------------------------------------------------------


async def accounts_after(
    connection: AsyncConnection[Any], account: str, asset: str, limit: int, with_balances: bool
) -> list[AccountRow]:  # fmt: skip
    """The next accounts in order, with their posted and expected sums. The expected sum is the verified sum
    plus the transfers of the ledger after the verified seq.

    Call it only if the ledger is at most some thousand events ahead of the verifier, and in the same snapshot
    as the cursors.
    """
    lines = in_lines("v.seq")
    rows = await connection.execute(
        "WITH keys AS (SELECT account, asset FROM ("  # noqa: S608 - no input
        "(SELECT account, asset FROM accounts "
        "WHERE (account, asset) > (%(account)s, %(asset)s) ORDER BY account, asset LIMIT %(limit)s) UNION "
        "(SELECT account, asset FROM verified_accounts "
        "WHERE (account, asset) > (%(account)s, %(asset)s) ORDER BY account, asset LIMIT %(limit)s)"
        ") AS both_sides ORDER BY account, asset LIMIT %(limit)s), "
        "ahead AS (SELECT t.asset, t.debit, t.credit, t.amount FROM verified AS v, "
        f"LATERAL (SELECT * FROM transfers WHERE transfers.shard = v.shard AND {lines} "
        # With OFFSET 0, each shard is looked up by the index; without it, all transfers are joined.
        "AND transfers.seq > v.seq OFFSET 0) AS t), "
        "changes AS (SELECT account, asset, sum(change) AS change FROM ("
        "SELECT debit AS account, asset, -amount AS change FROM ahead "
        "UNION ALL SELECT credit, asset, amount FROM ahead) AS legs GROUP BY account, asset) "
        "SELECT keys.account, keys.asset, coalesce(a.posted, 0), "
        "coalesce(v.posted, 0) + coalesce(c.change, 0), "
        "CASE WHEN NOT %(with_balances)s THEN NULL "
        "WHEN keys.account LIKE 'wallet:%%' THEN coalesce(b.available, 0) "
        "WHEN keys.account LIKE 'hold:%%' THEN coalesce(b.held, 0) END "
        "FROM keys LEFT JOIN accounts AS a USING (account, asset) "
        "LEFT JOIN verified_accounts AS v USING (account, asset) "
        "LEFT JOIN changes AS c USING (account, asset) "
        "LEFT JOIN balances AS b ON %(with_balances)s AND b.asset = keys.asset "
        "AND b.user_id = substr(keys.account, "
        "CASE WHEN keys.account LIKE 'wallet:%%' THEN 8 WHEN keys.account LIKE 'hold:%%' THEN 6 ELSE 65 END) "
        "ORDER BY keys.account, keys.asset",
        {"account": account, "asset": asset, "limit": limit, "with_balances": with_balances},
    )
    return [
        AccountRow(account, asset, int(posted), int(expected), None if balance is None else int(balance))
        for account, asset, posted, expected, balance in await rows.fetchall()
    ]


async def offers_after(
    connection: AsyncConnection[Any], offer: str, limit: int, near: Sequence[int]
) -> list[tuple[OfferState, tuple[int, int, int, int] | None, bool]]:  # fmt: skip
    """The next offers in order: the expected state, the numbers in the read model, and whether there are
    later events.

    Later events are searched only in the shards `near`, which are verified nearly to their end; of other
    shards, every offer counts as changed.
    """
    rows = await connection.execute(
        "SELECT v.offer, v.shard, v.offer_seq, v.seq, v.amount_left, v.units_left, v.held, v.grabs, "
        "v.retired, o.amount_left::bigint, o.units_left, o.held, o.grabs, "
        "CASE WHEN v.shard = ANY(%s) THEN EXISTS ("
        "SELECT FROM audit AS a WHERE a.shard = v.shard AND a.seq > p.seq AND a.offer = v.offer) "
        "ELSE true END "
        "FROM (SELECT * FROM verified_offers WHERE offer > %s ORDER BY offer LIMIT %s) AS v "
        "JOIN verified AS p USING (shard) LEFT JOIN offers AS o USING (offer) ORDER BY v.offer",
        (list(near), offer, limit),
    )
    return [
        (OfferState(*row[:9]), None if row[9] is None else row[9:13], row[13])
        for row in await rows.fetchall()
    ]


async def events_of_offers(
    connection: AsyncConnection[Any], offers: Sequence[str]
) -> list[tuple[int, int, str, bytes, bytes | None]]:
    """The lines of these offers by shard and seq, as (shard, seq, text, hash, hash of the line before)."""
    rows = await connection.execute(
        "SELECT a.shard, a.seq, a.body, a.hash, b.hash FROM audit AS a LEFT JOIN LATERAL ("
        "SELECT hash, seq + seqs AS next_seq FROM audit AS c WHERE c.shard = a.shard AND c.seq < a.seq "
        "ORDER BY c.seq DESC LIMIT 1) AS b ON b.next_seq = a.seq "
        "WHERE a.offer = ANY(%s) ORDER BY a.shard, a.seq",
        (list(offers),),
    )
    return [
        (shard, seq, body, bytes(hash_), before and bytes(before))
        for shard, seq, body, hash_, before in await rows.fetchall()
    ]


# -- findings ------------------------------------------------------------------------------------------------


async def open_findings(connection: AsyncConnection[Any]) -> list[OpenFinding]:
    """All open findings, the oldest first."""
    rows = await connection.execute(
        "SELECT id, kind, shard, subject, seq, what, found_at FROM findings "
        "WHERE cleared_at IS NULL ORDER BY found_at, id"
    )
    return [OpenFinding(*row) for row in await rows.fetchall()]


async def record_finding(
    connection: AsyncConnection[Any], kind: str, shard: int, problem: RecordedProblem
) -> bool:
    """Records a difference; returns whether it is new. A dismissed finding stays dismissed while its
    description is the same.
    """
    rows = await connection.execute(
        "WITH before AS (SELECT what, cleared_at, dismissed_by FROM findings "
        "WHERE (kind, shard, subject) = (%(kind)s, %(shard)s, %(subject)s)) "
        "INSERT INTO findings AS f (kind, shard, subject, seq, what) "
        "VALUES (%(kind)s, %(shard)s, %(subject)s, %(seq)s, %(what)s) "
        "ON CONFLICT (kind, shard, subject) "
        "DO UPDATE SET seen_at = now(), seq = excluded.seq, what = excluded.what, "
        "found_at = CASE WHEN f.cleared_at IS NULL OR f.what = excluded.what AND f.dismissed_by IS NOT NULL "
        "THEN f.found_at ELSE now() END, "
        "cleared_at = CASE WHEN f.what = excluded.what AND f.dismissed_by IS NOT NULL THEN f.cleared_at END, "
        "dismissed_by = CASE WHEN f.what = excluded.what THEN f.dismissed_by END, "
        "dismissed_because = CASE WHEN f.what = excluded.what THEN f.dismissed_because END "
        "RETURNING NOT EXISTS (SELECT FROM before "
        "WHERE what = %(what)s AND (cleared_at IS NULL OR dismissed_by IS NOT NULL))",
        {"kind": kind, "shard": shard, "subject": problem.subject, "seq": problem.seq, "what": problem.what},
    )
    [is_new] = await rows.fetchone() or [False]
    return bool(is_new)


async def has_findings(connection: AsyncConnection[Any]) -> bool:
    """Whether there is a finding that is not cleared."""
    rows = await connection.execute("SELECT EXISTS (SELECT FROM findings WHERE cleared_at IS NULL)")
    return bool((await rows.fetchone() or [False])[0])


async def clear_range(connection: AsyncConnection[Any], shard: int, after_seq: int, to_seq: int) -> None:
    """Clears findings about rows in a range that was verified without a problem."""
    await connection.execute(
        "UPDATE findings SET cleared_at = now() WHERE cleared_at IS NULL AND kind IN ('chain', 'ledger') "
        "AND shard = %s AND seq > %s AND seq <= %s",
        (shard, after_seq, to_seq),
    )


async def clear(
    connection: AsyncConnection[Any], kind: str, shard: int, compared: Sequence[str] | None,
    wrong: Sequence[str]
) -> None:  # fmt: skip
    """Clears findings of a kind about subjects that were compared (None: all were), except the subjects
    `wrong`, which differ.
    """
    await connection.execute(
        "UPDATE findings SET cleared_at = now() WHERE cleared_at IS NULL AND kind = %s AND shard = %s "
        "AND subject = ANY(coalesce(%s, ARRAY[subject])) AND subject <> ALL(%s)",
        (kind, shard, None if compared is None else list(compared), list(wrong)),
    )


async def clear_gone(connection: AsyncConnection[Any]) -> None:
    """Clears findings about accounts that no longer exist, and about offers that have left Redis."""
    await connection.execute(
        "UPDATE findings AS f SET cleared_at = now() WHERE f.cleared_at IS NULL AND f.kind = 'accounts' "
        "AND NOT EXISTS (SELECT FROM accounts AS a "
        # `<account> <asset>`: an account of a payment may have blanks, an asset has none.
        "WHERE a.account = regexp_replace(f.subject, ' [^ ]*$', '') "
        "AND a.asset = substring(f.subject FROM '[^ ]*$')) "
        "AND NOT EXISTS (SELECT FROM verified_accounts AS v "
        "WHERE v.account = regexp_replace(f.subject, ' [^ ]*$', '') "
        "AND v.asset = substring(f.subject FROM '[^ ]*$'))"
    )
    await connection.execute(
        "UPDATE findings AS f SET cleared_at = now() FROM verified_offers AS v "
        "WHERE f.cleared_at IS NULL AND f.kind = 'redis' AND v.offer = f.subject AND v.retired"
    )


async def dismiss(connection: AsyncConnection[Any], id: int, operator: str, reason: str) -> bool:
    """Dismisses a finding that an operator has explained: it is hidden while its description stays the same.
    Returns whether it was open.
    """
    done = await connection.execute(
        "UPDATE findings SET cleared_at = now(), dismissed_by = %s, dismissed_because = %s "
        "WHERE id = %s AND cleared_at IS NULL",
        (operator, reason, id),
    )
    return done.rowcount == 1
