"""The data dictionary: the rows of each view of a system's schema, and the meaning of each column.

It is the one source of the comments in the database (`projections/reports.py`) and of docs/data.md
(`scripts/data_dictionary.py`).
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

#: The unit of integer times, and the columns that have them in seconds.
_MS = "ms since 1970 UTC"
_SECONDS: Final = {"second": "s since 1970 UTC"}


class Column(NamedTuple):
    """A column: its type in PostgreSQL, its meaning, and the meaning of each value, if they are few."""

    type: str
    text: str
    values: Mapping[str, str] = {}

    @property
    def comment(self) -> str:
        """The text of its comment in the database."""
        values = "; ".join(f"{value}: {meaning}" for value, meaning in self.values.items())
        return f"{self.text} {values}." if values else self.text


class View(NamedTuple):
    """A view: its read model, the meaning of a row, the columns that name a row, and all columns in order."""

    source: str
    text: str
    key: tuple[str, ...]
    columns: Mapping[str, Column]

    @property
    def comment(self) -> str:
        """The text of its comment in the database."""
        return f"{self.text} Key: {', '.join(self.key)}." if self.key else self.text

    @property
    def comments(self) -> dict[str, str]:
        """The comments of its columns, by name."""
        return {name: column.comment for name, column in self.columns.items()}


_STATES_OF_OFFERS: Final = {
    "open": "it takes grabs, from `opens_at` on and in its hours",
    "paused": "grabs are refused with `on_hold` until it is resumed",
    "closed": "it takes no more grabs; holds may still be confirmed, units returned",
    "retired": "Redis no longer has it",
}
_STATES_OF_GRABS: Final = {
    "granted": "units are the user's, without a hold",
    "held": "some units wait to be confirmed",
    "confirmed": "units that were held are the user's",
    "waiting": "on the waiting list",
    "released": "all units went back, by a release or from the waiting list",
    "expired": "all units went back at the deadline",
    "returned": "all units went back after they were the user's",
}
_STATES_OF_PAYMENTS: Final = {
    "served": "it confirmed units",
    "refund_due": "it confirmed nothing, and must be refunded",
}
_REASONS: Final = {
    "command": "by an operator",
    "deadline": "at `closes_at`",
    "drained": "with the last part of an envelope",
}
_KINDS: Final = {
    "envelope": "money in parts",
    "coupon": "pieces that are redeemed",
    "stock": "pieces that are sold or given",
}
_PROJECTIONS: Final = {
    "ledger": "transfers and accounts",
    "balances": "offers, grabs, payments and balances",
    "audit": "lines of the journal",
    "events": "the topic of single events",
}
_EVENTS: Final = "Type of the event, such as grab.held (docs/events.md, schemas/events)."

#: The meaning of a column in every view without another text for it. Without a type: bigint.
_COMMON: Final[Mapping[str, str | tuple[str, str] | Column]] = {
    "offer": ("text", "Id of the offer."),
    "campaign": ("text", "Id of the campaign: the offer's id up to its first colon."),
    "grab": ("text", "Id of the grab, which is the id of its command."),
    "user_id": ("text", "Id of the user."),
    "shard": ("integer", "Number of the shard that decided it; each shard has a journal partition."),
    "seq": "Number of the event in its shard, from 1 without gaps.",
    "at": f"Time of the event by the clock of its shard, {_MS}.",
    "asset": ("text", "What is counted: money by its code (CNY), or pieces (sku:…, coupon:…)."),
    "currency": ("text", "Currency of the money, such as CNY. NULL: no money is paid."),
    "kind": Column("text", "Kind of the offer.", _KINDS),
    "title": ("text", "Title of the offer."),
    "quantity": "Units that the grab got or waits for. A part of an envelope is 1 unit.",
    "place": "Ordinal of the grab within the offer, from 1; while it waits, its number on the waiting list.",
    "deadline_at": f"Until when the hold must be confirmed, {_MS}. NULL: it is not a hold.",
    "waiting": "Grabs on the waiting list now.",
    "body": ("text", "The event as JSON, byte for byte."),
    "type": ("text", _EVENTS),
    "command": ("text", "Id of the command that caused it; `sweep`: the system did, at a deadline."),
    "outcome": ("text", "Name of the outcome (the table `outcomes`, docs/commands.md)."),
    "code": ("integer", "Number of the outcome."),
    "debit": ("text", "The account that gives, such as offer:lunch, wallet:ann, hold:ann or issuer:shop."),
    "credit": ("text", "The account that receives."),
    "leg": ("smallint", "Number of the transfer within its event, from 0."),
    "projection": Column("text", "The read model.", _PROJECTIONS),
    "head": ("bytea", "SHA-256 of the chain of events up to `seq`."),
    "next_offset": "Offset in the journal partition after the last record that was read.",
    "term": "Term of the last marker of the journal that counts (docs/protocol.md).",
    "owner": ("text", "Owner of that term."),
    "amount": "Amount in `asset`: minor units of money, or pieces.",
    "by": ("text", "What is limited: `user`, or the name of an attribute."),
    "first_seq": "The first event of the record.",
    "journal_offset": "Offset of the record in the journal partition.",
    "refusals": "Number of refusals.",
    "metadata": ("jsonb", "Texts by name that the grab was sent with. NULL: none."),
}  # fmt: skip


def _columns(names: str, **texts: str | tuple[str, str] | Column) -> dict[str, Column]:
    """The columns in order. A specific text takes precedence over the common one; a name that ends with
    `_time` is the integer time next to it.
    """
    columns: dict[str, Column] = {}
    for name in names.split():
        text = texts[name] if name in texts else _COMMON.get(name)
        if text is None and name.endswith("_time"):
            columns[name] = _time_of(name, columns)
        elif text is None:
            raise KeyError(f"the dictionary has no text for the column {name}")
        else:
            columns[name] = _column(text)
    if unknown := texts.keys() - columns.keys():
        raise KeyError(f"texts of columns that the view does not have: {', '.join(sorted(unknown))}")
    return columns


def _column(text: str | tuple[str, str] | Column) -> Column:
    if isinstance(text, Column):
        return text
    return Column("bigint", text) if isinstance(text, str) else Column(*text)


def integer_of(name: str) -> str:
    """The name of the integer column of which `name` is the timestamptz."""
    base = name.removesuffix("_time")
    return base if base in ("at", *_SECONDS) else f"{base}_at"


def _time_of(name: str, columns: Mapping[str, Column]) -> Column:
    source = integer_of(name)
    if source not in columns:
        raise KeyError(f"{name} has no integer column {source}")
    never = next((part for part in columns[source].text.split(". ") if part.startswith("NULL: ")), None)
    return Column("timestamptz", f"`{source}` as timestamptz." + (f" {never.rstrip('.')}." if never else ""))


_TRANSFER: Final = "shard seq leg offer asset debit credit amount at"

VIEWS: Final[Mapping[str, View]] = {
    "offers": View(
        "balances", "Offers with their state and the results for their units so far.", ("offer",),
        _columns(
            "offer shard kind issuer funding asset total units title state opened_at opens_at closes_at "
            "closed_at retired_at reason grabs given held waiting units_left amount_left refunded "
            "seed_sha256 seed terms opened_time opens_time closes_time closed_time retired_time campaign "
            "campaign_timezone total_amount given_amount left_amount refunded_amount given_units "
            "refunded_units known_timezone",
            issuer=("text", "Who issued it."),
            funding=("text", "Payment that funded it. NULL: pieces need none."),
            total="Minor units of an envelope, pieces of other kinds: see `total_amount` and `units`.",
            units="Parts of an envelope, pieces of other kinds.",
            state=Column("text", "State of the offer.", _STATES_OF_OFFERS),
            opened_at=f"When it was created, {_MS}.",
            opens_at=f"From when on it takes grabs, {_MS}.",
            closes_at=f"Until when it takes grabs, {_MS}; 4102444800000: it does not close automatically.",
            closes_time=(
                "timestamptz", "`closes_at` as timestamptz. NULL: it does not close automatically."
            ),
            closed_at=f"When it closed, {_MS}. NULL: it has not closed.",
            retired_at=f"When it left Redis, {_MS}. NULL: it has not retired.",
            reason=Column("text", "Why it closed. NULL: it has not closed.", _REASONS),
            grabs="Grabs that got units.",
            given="Minor units of an envelope, pieces of other kinds, that users have now, units on hold not "
                  "counted: see `given_amount` and `given_units`.",
            held="Pieces that are held now.",
            units_left="Parts or pieces that can still be taken.",
            amount_left="Minor units or pieces in the account of the offer. Pieces of it above `units_left` "
                        "came back without their codes: no one can take them.",
            refunded="Minor units or pieces that went back to the issuer: see `refunded_amount` and "
                     "`refunded_units`.",
            seed_sha256=("text", "SHA-256 of the seed of an envelope. NULL: pieces have none."),
            seed=("text", "The seed of an envelope. NULL: it has not closed, or it has no seed."),
            terms=("jsonb", "The terms, with all amendments."),
            campaign_timezone=(
                "text", "Time zone in which limits of the campaign count, and of `results_by_week`."
            ),
            total_amount="Minor units of an envelope. NULL: pieces.",
            given_amount="Minor units of an envelope that users got. NULL: pieces.",
            left_amount="Minor units of an envelope that are left. NULL: pieces.",
            refunded_amount="Minor units of an envelope that went back when it closed. NULL: pieces.",
            given_units="Parts or pieces that users have now, units on hold not counted.",
            refunded_units="Parts or pieces that went back to the issuer.",
            known_timezone=(
                "text", "`campaign_timezone`, or UTC where this PostgreSQL does not know that zone."
            ),
        ),
    ),
    "grabs": View(
        "balances", "Grabs that got units or wait for them, with their state now.",
        ("offer", "user_id", "grab"),
        _columns(
            "offer grab user_id state quantity amount asset place shard seq at held taken redeemed back "
            "deadline_at due currency paid refunded attributes basket metadata at_time deadline_time "
            "part_amount is_waiting",
            state=Column("text", "State of the grab.", _STATES_OF_GRABS),
            amount="Minor units of a part of an envelope, else pieces, as `quantity`.",
            seq="Number of the event that granted, held or queued it, in its shard.",
            at=f"When it was granted, held or queued, {_MS}.",
            held="Units that wait to be confirmed.",
            taken="Units that are the user's now, with those that are redeemed.",
            redeemed="Units of `taken` that were used for orders.",
            back="Units that went back, or are still waited for.",
            due="Minor units of `currency` that the hold costs. NULL: no payment is due.",
            paid="Minor units of `currency` that were paid.",
            refunded="Minor units of `currency` that returns gave back of `paid`.",
            attributes=("jsonb", "Attributes that the grab was sent with. NULL: none."),
            basket=("text", "Id that the grabs of a basket share. NULL: it was not in a basket."),
            part_amount="Minor units of a part of an envelope. NULL: pieces.",
            is_waiting=(
                "boolean",
                "Whether the `state` is `waiting`. Queries for all others, by `place`, are fast with it.",
            ),
        ),
    ),
    "payments": View(
        "balances", "Payments that were booked: each confirms units, or is due for a refund.",
        ("shard", "seq"),
        _columns(
            "payment offer grab amount currency state outcome refunded shard seq at at_time",
            payment=("text", "Id of the payment."),
            amount="Minor units of `currency` that came.",
            currency=("text", "Currency of the payment."),
            state=Column("text", "Result of the payment.", _STATES_OF_PAYMENTS),
            outcome=("text", "`confirmed`, or why it could not be served."),
            refunded="Minor units of a served payment that returns gave back.",
        ),
    ),
    "limits": View(
        "balances",
        "What each limit of present offers leaves for each value in the current window, and until when.",
        ("offer", "by", "per", "scope", "value"),
        _columns(
            "offer by per scope value max counted left resets_at resets_time",
            per=("text", "Period of the limit: `hour`, `day`, `week`, or `offer` (in all)."),
            scope=("text", "Whether grabs of the `offer` or of the `campaign` count."),
            value=("text", "The user, or the value of the attribute."),
            max="Units that the limit allows.",
            counted="Units that count now.",
            left="Units that the limit leaves. A keyword of SQL: write `\"left\"`, in quotes.",
            resets_at=f"When the window ends, by the local clock (UTC where this PostgreSQL does not know "
                      f"the zone), {_MS}. NULL for the window `offer`.",
        ),
    ),
    "waiting": View(
        "balances", "The waiting lists of offers that have not closed.", ("offer", "grab"),
        _columns(
            "offer grab user_id quantity at position at_time",
            quantity="Units that it waits for.",
            at=f"When it was queued, {_MS}.",
            position="Position on the list; 1 is served next.",
        ),
    ),
    "balances": View(
        "balances", "What each user has of each asset, over all offers and corrections.",
        ("user_id", "asset"),
        _columns(
            "user_id asset available held",
            available=("numeric", "Minor units or pieces that are the user's."),
            held=("numeric", "Pieces that are held for the user."),
        ),
    ),
    "fairness": View(
        "balances", "Amounts of parts by their place, over all envelopes of the same terms, with the mean "
        "that the law gives every place.",
        ("asset", "law", "total", "parts", "min", "max", "place"),
        _columns(
            "asset law total parts min max place grabs amount_mean law_mean difference standard_error "
            "amount_min amount_max",
            law=("text", "Law of splitting: double_mean, bounded or equal."),
            total="Minor units of each of the envelopes.",
            parts="Parts of each of the envelopes.",
            min="Smallest part that the terms allow, in minor units.",
            max="Largest part that the terms allow, in minor units. NULL: the terms have no bound.",
            place="Ordinal of the part within its envelope, from 1.",
            grabs="Parts that were taken at this place: one of each envelope.",
            amount_mean=("numeric", "Their mean, in minor units."),
            law_mean=("numeric", "The mean that the law gives this place: total ÷ parts."),
            difference=("numeric", "`amount_mean` − `law_mean`."),
            standard_error=(
                "numeric", "Standard error of `amount_mean`; chance explains a few of it. NULL: one part."
            ),
            amount_min="The smallest of them.",
            amount_max="The largest of them.",
        ),
    ),
    "accounts": View(
        "ledger", "The sum of all transfers from and to each account.", ("account", "asset"),
        _columns(
            "account asset posted",
            account=("text", "The account: its kind, a colon, and whose it is."),
            posted=("numeric", "What it received minus what it gave, in minor units or pieces."),
        ),
    ),
    "transfers": View(
        "ledger",
        "Movements of an amount from one account to another: the ledger. The function "
        "`user_transfers('ann')` returns the transfers of one user, without `line_seq`.",
        ("shard", "seq", "leg"),
        _columns(
            f"{_TRANSFER} line_seq at_time",
            line_seq="`seq` of the first event of the line in the journal; unlike `seq`, it has an index.",
        ),
    ),
    "transfers_by_user": View(
        "ledger", "Transfers outside runs with their user; `user_transfers` reads it.", (),
        _columns(
            f"user_id {_TRANSFER} at_time",
            user_id=("text", "User of one of the accounts. NULL: neither is a user's."),
        ),
    ),
    "transfer_runs": View(
        "ledger", "Transfers of runs of grabs, a row for each run; `user_transfers` reads it.",
        ("shard", "seq"),
        _columns(
            "shard seq offer asset debit credit_kind users amounts at at_time",
            seq="Number of the first event of the run in its shard.",
            credit_kind=("text", "Kind of the accounts that receive, with its colon."),
            users=("text[]", "Users, in order of seq."),
            amounts=("bigint[]", "Amount for each user, in minor units or pieces."),
        ),
    ),
    "flows": View(
        "ledger", "The sum of the transfers of an offer between each pair of kinds of accounts.",
        ("offer", "asset", "debit_kind", "credit_kind"),
        _columns(
            "offer asset debit_kind credit_kind transfers amount",
            debit_kind=("text", "Kind of the accounts that give: offer, hold, wallet, external, issuer, …"),
            credit_kind=("text", "Kind of the accounts that receive."),
            transfers="Number of transfers.",
            amount=("numeric", "Their sum, in minor units or pieces."),
        ),
    ),
    "revenue": View(
        "ledger",
        "Money paid for units and given back by returns, by the minute. Correcting entries do not count.",
        ("offer", "currency", "minute_at"),
        _columns(
            "offer currency minute_at payments paid refunded revenue minute_time",
            currency=("text", "Currency of the money."),
            minute_at=f"Begin of the minute, {_MS}.",
            payments="Payments that confirmed units.",
            paid=("numeric", "Minor units that they paid."),
            refunded=("numeric", "Minor units that returns gave back."),
            revenue=("numeric", "`paid` − `refunded`."),
        ),
    ),
    "audit": View(
        "audit",
        "The lines of the journal, byte for byte. A run of grabs is one line. The function "
        "`seqs_between(since, until)` finds those of a range of time.",
        ("shard", "seq"),
        _columns(
            "shard seq offer type at body hash seqs at_time",
            seq="Number of the first event of the line in its shard.",
            body=("text", "The line, byte for byte."),
            hash=("bytea", "SHA-256 of the hash of the line before, and this line."),
            seqs=("integer", "Events of the line: its grabs, if it is a run."),
        ),
    ),
    "events": View(
        "audit", "Every event as a single row, as on grab.events.", ("shard", "seq"),
        _columns("shard seq offer type at body at_time"),
    ),
    "operations": View(
        "audit", "What operators did.", ("shard", "seq"),
        _columns(
            "shard seq offer type at operator command body at_time",
            operator=("text", "Who did it, as the command says. NULL: it does not say."),
            command=("text", "Id of the command."),
        ),
    ),
    "demand": View(
        "gates", "Refusals counted by second. Refusals are not events, so no rebuild restores them.",
        ("offer", "code", "second"),
        _columns(
            "offer outcome code second refusals second_time",
            offer=("text", "Id of the offer; *: all offers that do not exist."),
            second=f"The second, {_SECONDS['second']}.",
        ),
    ),
    "refusals": View(
        "gates",
        "A bounded sample of single refusals, the newest; `demand` counts all. A payment that is due for a "
        "refund is an event: it is here, but `demand` does not count it.",
        (),
        _columns(
            "at type command offer user_id grab quantity outcome code retry_at limit_name limit_left "
            "units_left message at_time retry_time",
            at=f"When it was refused, {_MS}.",
            type=("text", "Type of the command."),
            command=("text", "Id of the command."),
            user_id=("text", "Id of the user. NULL: the command names none."),
            grab=("text", "Id of the grab. NULL: the command names none."),
            quantity="Units that were asked for. NULL: the command names none.",
            retry_at=f"When it may be tried again, {_MS}. NULL: never, or not known.",
            limit_name=("text", "The limit that was reached. NULL: none was."),
            limit_left="Units that this limit left.",
            units_left="Units that could be taken then.",
            message=("text", "What is wrong with the command. NULL: the outcome says it."),
        ),
    ),
    "refusals_by_reason": View(
        "report", "Refusals of an offer by their reason.", ("offer", "outcome"),
        _columns(
            "offer outcome refusals first_time last_time",
            offer=("text", "Id of the offer; *: all offers that do not exist."),
            first_time=("timestamptz", "The second of the first of them."),
            last_time=("timestamptz", "The second of the last of them."),
        ),
    ),
    "results_by_week": View(
        "report", "Results of each offer so far, by the week in which it opens. Units are parts of an "
        "envelope, else pieces; money is in minor units of `currency`.",
        ("offer",),
        _columns(
            "week campaign offer title kind state asset currency timezone opens_time closed_time offered "
            "grabs granted held confirmed retaken sold released returned kept pending waiting given_amount "
            "payments paid late_payments late_served late_paid refunded refund_due revenue sold_out_time "
            "sold_out_after",
            week=("text", "ISO week of `opens_time` in `timezone`, such as 2026-W47."),
            state=Column("text", "State of the offer.", _STATES_OF_OFFERS),
            timezone=("text", "Time zone of the campaign; UTC where this PostgreSQL does not know it."),
            opens_time=("timestamptz", "When it begins to take grabs."),
            closed_time=("timestamptz", "When it closed. NULL: it has not closed."),
            offered="Units of the offer, with amendments.",
            grabs="Grabs that got units.",
            granted=("numeric", "Units that were granted without a hold."),
            held=("numeric", "Units that were ever held."),
            confirmed=("numeric", "Units that were confirmed, `retaken` ones among them."),
            retaken=("numeric", "Units that a late payment took from the offer again."),
            sold=("numeric", "`granted` + `confirmed`, which is `kept` + `returned`."),
            released=("numeric", "Held units that were released or expired."),
            returned=("numeric", "Units that were returned after they were the user's."),
            kept="Units that users have now.",
            pending="Units that are held now.",
            given_amount="Minor units of an envelope that users got. NULL: pieces.",
            payments="Payments that confirmed units.",
            paid=("numeric", "Money that they paid."),
            late_payments="Payments that came at the deadline of their hold or later.",
            late_served="Late payments that still confirmed units.",
            late_paid=("numeric", "Money that late payments paid for units."),
            refunded=("numeric", "Money that returns gave back."),
            refund_due=("numeric", "Money of payments that confirmed nothing and must be refunded."),
            revenue=("numeric", "`paid` − `refunded`."),
            sold_out_time=("timestamptz", "When nothing was left for the first time. NULL: never."),
            sold_out_after=("interval", "`sold_out_time` − `opens_time`. NULL: never sold out."),
        ),
    ),
    "funnel": View(
        "report", "From attempts to sales: grabs, then units (parts of an envelope, else pieces).",
        ("offer",),
        _columns(
            "offer campaign kind attempts refused accepted waiting granted held confirmed retaken released "
            "returned refusals",
            attempts="`refused` + `accepted`: grabs that were decided, and the other commands in `refused`. "
                     "Repeats of a command count once.",
            refused="Refusals whose outcome a grab may have. `demand` does not distinguish commands, so it "
                    "includes refusals of others: `limit_reached` and `not_enough_left` when grabs are "
                    "extended, paid or returned, `over` and `not_enough_left` when offers are amended or "
                    "loaded.",
            accepted="Grabs that were granted, held or queued.",
            granted=("numeric", "Units that were granted without a hold."),
            held=("numeric", "Units that were held."),
            confirmed=("numeric", "Units that were confirmed, `retaken` ones among them."),
            retaken=("numeric", "Units that a late payment took from the offer again."),
            released=("numeric", "Held units that were released or expired."),
            returned=("numeric", "Units that were returned after they were the user's."),
            refusals=("jsonb", "Refusals of all commands about the offer, by outcome."),
        ),
    ),
    "cursors": View(
        "system", "How far each read model has read each shard of the journal.", ("projection", "shard"),
        _columns(
            "projection shard seq head next_offset term owner",
            seq="The last event that was read.",
        ),
    ),
    "projection_cursors": View(
        "system", "As `cursors`, with the time of the last move.", ("projection", "shard"),
        _columns(
            "projection shard seq head next_offset term owner moved_at",
            seq="The last event that was read.",
            moved_at=("timestamptz", "When the cursor was last moved."),
        ),
    ),
    "stopped_shards": View(
        "system", "Shards at which a read model has stopped.", ("projection", "shard"),
        _columns(
            "projection shard seq journal_offset reason stopped_at",
            seq="The last event that was read.",
            reason=("text", "Why it stopped."),
            stopped_at=("timestamptz", "When it stopped."),
        ),
    ),
    "verification": View(
        "system", "Progress of the verifier.", ("shard",),
        _columns(
            "shard seq head rounds verified_at compared_at findings",
            seq="The last event up to which everything was verified.",
            rounds="How often everything before it was verified again.",
            verified_at=("timestamptz", "When it verified last. NULL: never."),
            compared_at=("timestamptz", "When it compared accounts and offers last. NULL: never."),
            findings="Open differences (the table `findings`).",
        ),
    ),
    "set_aside": View(
        "system", "Records of the journal that operators set aside for a read model.", ("id",),
        _columns(
            "id projection shard journal_offset first_seq count offers readable missing refused_because "
            "reason operator at read_model in_force",
            id="Number of the row.",
            count="Events that it has.",
            offers=("text[]", "Offers that its events are about."),
            readable=("boolean", "Whether all of its events can be read."),
            missing=("jsonb", "What accounts lack for it: lists of account, asset and amount."),
            refused_because=("text", "Why the read model could not apply it."),
            reason=("text", "Why the operator set it aside."),
            operator=("text", "Who set it aside."),
            at=("timestamptz", "When it was set aside."),
            read_model=("text", "Schema of the version of the read model."),
            in_force=("boolean", "Whether that version is live."),
        ),
    ),
}  # fmt: skip
