"""Refusals in words, for every door: the reason for one command, and the grab that caused the refusal of a
basket.

The words name the id of a command as its door does: `id`, or a header of HTTP.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import structs

from grabstream.models.answers import Answer
from grabstream.models.bounds import counted, shortened
from grabstream.models.calendar import utc_text
from grabstream.models.commands import (
    Amend,
    AnyCommand,
    Grab,
    GrabCommand,
    Load,
    Open,
    Redeem,
    Return,
    Unredeem,
)
from grabstream.models.outcomes import Outcome

#: How much of a message of the scripts the words of a refusal quote.
QUOTED_BYTES_MAX: Final = 600
#: The message of the answers to a basket that was refused, except to the grab that was refused first.
WHOLE_BASKET: Final = "the basket was refused as a whole"

_basket_refused = re.compile(r"basket: refused at offer \S+, with grab (\S+)\Z").match
_Words = Callable[[Answer, AnyCommand, str], str]


def words_of(answer: Answer, command: AnyCommand, id_name: str = "id") -> str:
    """The words of a refusal. `id_name` is the sender's name for the id of a command."""
    if isinstance(command, Grab) and command.basket is not None and answer.repeated and not answer.message:
        # Messages are not remembered, so it is unknown for which of the grabs it holds.
        return (
            f"The basket {command.basket} was refused before, as {answer.outcome}: none of its grabs was "
            f"granted. Only its first answer named the grab that caused it. Another basket needs another "
            f"{id_name}."
        )
    if answer.repeated and answer.code in _WORDS_BEFORE:
        return shortened(_before(answer, command, id_name))
    return shortened(_WORDS[Outcome(answer.code)](answer, command, id_name))


def refused_with(answer: Answer) -> str | None:
    """The id of the grab that caused the refusal of a basket, by the answer to one of its grabs; else
    None.
    """
    found = _basket_refused(answer.message or "")
    return found[1] if found else None


def refusal_of_basket(answers: Sequence[Answer], commands: Sequence[AnyCommand]) -> tuple[Answer, AnyCommand]:
    """The refusal that caused the refusal of a basket, and its command. At least one answer must be a
    refusal.
    """
    # As a rule, each answer names the grab that was refused first. A basket that another one shares its key
    # with may have first answers of that one, too.
    index = next(index for index, one in enumerate(answers) if not one.positive)
    answer = answers[index]
    if (named := refused_with(answer)) is not None:
        index = next((index for index, command in enumerate(commands) if command.id == named), 0)
        words = WHOLE_BASKET
        if answer.code == Outcome.invalid:
            words = (
                f"grabs: number {index + 1} does not fit its offer, which is an envelope, or never takes "
                f"this quantity, or needs attributes; {WHOLE_BASKET}"
            )
        answer = structs.replace(answers[index], message=words)
    return answer, commands[index]


def _again(answer: Answer, id_name: str) -> str:
    at = f" after {utc_text(answer.retry_at)}" if answer.retry_at else ""
    return f"This request was not decided: send it again{at}, with the same {id_name}."


def _before(answer: Answer, command: AnyCommand, id_name: str) -> str:
    """The words of a repeated refusal. Outcome and time are remembered, reasons and numbers are not."""
    at = f" at {utc_text(answer.at)}" if answer.at else ""
    words = _WORDS_BEFORE[Outcome(answer.code)](answer, command, id_name)
    return (
        f"This is the answer that {id_name} {command.id} got before{at}: {words}. The same {id_name} always "
        f"gets it, whatever has changed since; a new attempt needs a new {id_name}."
    )


def _because(answer: Answer) -> str:
    return f" ({shortened(answer.message, QUOTED_BYTES_MAX)})" if answer.message else ""


def _invalid(answer: Answer, command: AnyCommand, id_name: str) -> str:
    return answer.message or "The command is malformed, or exceeds a bound."


def _fenced(answer: Answer, command: AnyCommand, id_name: str) -> str:
    return (
        f"The shard of offer {command.offer} cannot decide now{_because(answer)}, usually for a few "
        f"seconds. {_again(answer, id_name)}"
    )


def _busy(answer: Answer, command: AnyCommand, id_name: str) -> str:
    return f"There is no room for more commands now{_because(answer)}. {_again(answer, id_name)}"


def _conflict(answer: Answer, command: AnyCommand, id_name: str) -> str:
    return (
        f"The id {command.id} was used before, with another "
        f"body{_other_conflict(command)}{_because(answer)}. The command changed nothing. Another command "
        f"needs another {id_name}; this does not change with time."
    )


def _other_conflict(command: AnyCommand) -> str:
    """What a command may conflict with apart from an earlier command under its id."""
    if isinstance(command, Load):
        return f"; or chunk {command.chunk} of the {command.what} of offer {command.offer} is loaded"
    if isinstance(command, Open):
        return f"; or there is an offer {command.offer}, or was one"
    if isinstance(command, Redeem):
        return f"; or order {command.order} used another quantity of grab {command.grab}"
    if isinstance(command, Grab):
        basket = command.basket
        with_others = (
            "" if basket is None else f"; or the basket {basket} was decided before with other grabs"
        )
        return f", or for the grab of another user{with_others}"
    return ""


def _no_such_offer(answer: Answer, command: AnyCommand, id_name: str) -> str:
    return (
        f"There is no offer {command.offer}: it was never opened, or it has retired{_because(answer)}. This "
        "does not change with time, unless the offer is opened."
    )


def _no_such_grab(answer: Answer, command: AnyCommand, id_name: str) -> str:
    whose = f" of user {command.user}" if isinstance(command, GrabCommand) and command.user else ""
    return (
        f"Offer {command.offer} has no grab {_grab_of(command)}{whose} that could be settled"
        f"{_because(answer)}."
    )


def _already_taken(answer: Answer, command: AnyCommand, id_name: str) -> str:
    # Only envelopes have parts, of an amount of money; the answer does not name its currency.
    amount = "" if answer.amount is None else f": {answer.amount} minor units, at place {answer.place}"
    return f"{_user_of(command)} already has a part of {command.offer}{amount}. A user gets one part."


def _not_open_yet(answer: Answer, command: AnyCommand, id_name: str) -> str:
    if answer.retry_at:
        from_then = utc_text(answer.retry_at)
        return f"Offer {command.offer} accepts no grabs now; it accepts grabs from {from_then} on."
    return (
        f"Offer {command.offer} accepts no grabs yet: what it needs (codes, audience, randomness) is not "
        "loaded completely. It is not known when it will be."
    )


def _on_hold(answer: Answer, command: AnyCommand, id_name: str) -> str:
    return f"Offer {command.offer} is paused until an operator resumes it; it is not known when that will be."


def _over(answer: Answer, command: AnyCommand, id_name: str) -> str:
    return f"Offer {command.offer} is closed permanently{_because(answer)}."


def _not_eligible(answer: Answer, command: AnyCommand, id_name: str) -> str:
    user = _user_of(command)
    if isinstance(command, Grab) and command.ticket is not None:
        return (
            f"The ticket does not let {user} grab offer {command.offer}: its signature is wrong, it is for "
            "another user or another offer, it has expired, or it was used before. Another ticket may be "
            "accepted."
        )
    return (
        f"{user} may not grab offer {command.offer}: it is for the users of a list, or for those with a "
        "ticket. Without a ticket, this does not change with time."
    )


def _limit_reached(answer: Answer, command: AnyCommand, id_name: str) -> str:
    limit = answer.limit
    if limit is None:
        return f"A limit of offer {command.offer} is reached{_because(answer)}."
    if limit.by == "grab":
        return (
            f"The hold of grab {_grab_of(command)} was extended {counted(limit.max, 'times')}, as "
            f"often as offer {command.offer} allows. This does not change with time."
        )
    until = f" until {utc_text(limit.resets_at)}" if limit.resets_at else ", for as long as it is open"
    whole = "in the whole offer" if limit.per == "offer" else f"in each {limit.per}"
    of = "the campaign of " if limit.scope == "campaign" else ""
    whose = _user_of(command) if limit.by == "user" else f"this {limit.by}"
    return (
        f"{whose} may get {counted(limit.max, 'units')} of {of}offer {command.offer} {whole}; "
        f"{limit.left} of them are left{until}."
    )


def _sold_out(answer: Answer, command: AnyCommand, id_name: str) -> str:
    return (
        f"Nothing is left of offer {command.offer}{_because(answer)}. It is not known whether units will "
        "come back."
    )


def _not_enough_left(answer: Answer, command: AnyCommand, id_name: str) -> str:
    asked = getattr(command, "quantity", None) or 1
    if isinstance(command, Grab):
        left = "fewer" if answer.left is None else f"only {answer.left}"
        return f"{asked} units of offer {command.offer} were requested, {left} are left; request fewer."
    if isinstance(command, Return) and answer.left is not None:
        if not answer.left:
            return f"No unit of grab {command.grab} can be returned: its units are redeemed; unredeem first."
        return (
            f"{asked} units were requested, {answer.left} of grab {command.grab} can be returned; request "
            "fewer, or unredeem first those that were redeemed."
        )
    if isinstance(command, Amend):
        left = "fewer" if answer.left is None else f"{answer.left}"
        return (
            f"The total of offer {command.offer} cannot be {command.changes.total}: units that are left and "
            f"can be taken out of it: {left}."
        )
    return (
        f"{asked} units were requested, which is more than grab {_grab_of(command)} has{_because(answer)}; "
        "request fewer."
    )


def _expired(answer: Answer, command: AnyCommand, id_name: str) -> str:
    if isinstance(command, Redeem):
        return f"The units of grab {command.grab} can no longer be used: the offer's valid_until has passed."
    return f"The hold of grab {_grab_of(command)} has ended{_because(answer)}. It cannot be restored."


def _not_held(answer: Answer, command: AnyCommand, id_name: str) -> str:
    what = "units that could be returned" if isinstance(command, Return) else "units on hold"
    return f"Grab {_grab_of(command)} has no {what}{_because(answer)}."


def _not_redeemable(answer: Answer, command: AnyCommand, id_name: str) -> str:
    if isinstance(command, Unredeem):
        return f"Grab {command.grab} was never used for order {command.order}, or that was undone already."
    needed = command.quantity if isinstance(command, Redeem) else 1
    return (
        f"Grab {_grab_of(command)} cannot be used: its offer is not a coupon, or it has fewer than {needed} "
        f"unused units that are granted or confirmed{_because(answer)}. Confirm a hold first."
    )


def _grab_of(command: AnyCommand) -> str:
    return command.grab if isinstance(command, GrabCommand) else command.id


def _user_of(command: AnyCommand) -> str:
    user = command.user if isinstance(command, Grab | GrabCommand) else None
    return f"User {user}" if user else "This user"


#: The words of every refusal.
_WORDS: Final[Mapping[Outcome, _Words]] = {
    Outcome.invalid: _invalid,
    Outcome.fenced: _fenced,
    Outcome.busy: _busy,
    Outcome.conflict: _conflict,
    Outcome.no_such_offer: _no_such_offer,
    Outcome.no_such_grab: _no_such_grab,
    Outcome.already_taken: _already_taken,
    Outcome.not_open_yet: _not_open_yet,
    Outcome.on_hold: _on_hold,
    Outcome.over: _over,
    Outcome.not_eligible: _not_eligible,
    Outcome.limit_reached: _limit_reached,
    Outcome.sold_out: _sold_out,
    Outcome.not_enough_left: _not_enough_left,
    Outcome.expired: _expired,
    Outcome.not_held: _not_held,
    Outcome.not_redeemable: _not_redeemable,
}


#: What every refusal said when it was first given, of those that are remembered. The words of
#: `already_taken` always hold.
_WORDS_BEFORE: Final[Mapping[Outcome, _Words]] = {
    Outcome.no_such_offer: lambda _, command, __: f"there was no offer {command.offer}",
    Outcome.no_such_grab: lambda _, command, __: (
        f"offer {command.offer} had no grab {_grab_of(command)} that could be settled"
    ),
    Outcome.not_open_yet: lambda _, command, __: f"offer {command.offer} took no grabs then",
    Outcome.on_hold: lambda _, command, __: f"offer {command.offer} was paused",
    Outcome.over: lambda _, command, __: f"offer {command.offer} was closed",
    Outcome.not_eligible: lambda _, command, __: f"{_user_of(command)} could not grab offer {command.offer}",
    Outcome.limit_reached: lambda _, command, __: f"a limit of offer {command.offer} was reached",
    Outcome.sold_out: lambda _, command, __: f"nothing was left of offer {command.offer}",
    Outcome.not_enough_left: lambda _, command, __: (
        f"offer {command.offer} had fewer units left"
        if isinstance(command, Grab)
        else f"grab {_grab_of(command)} had fewer units"
    ),
    Outcome.expired: lambda _, command, __: (
        "the offer's valid_until had passed"
        if isinstance(command, Redeem)
        else f"the hold of grab {_grab_of(command)} had ended"
    ),
    Outcome.not_held: lambda _, command, __: (
        f"grab {_grab_of(command)} had no units that could be "
        f"{'returned' if isinstance(command, Return) else 'settled'}"
    ),
    Outcome.not_redeemable: lambda _, command, __: (
        f"order {command.order} had used nothing of grab {command.grab}, or that was undone"
        if isinstance(command, Unredeem)
        else f"grab {_grab_of(command)} could not be used"
    ),
}
