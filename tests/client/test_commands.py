"""The methods of clients make commands from their fields."""

import pytest
from pydantic import ValidationError

from grabstream.client.commands import CommandMethods
from grabstream.models.vocabulary import AnyCommand, Grab, Pause, Redeem


class Made(CommandMethods[AnyCommand, None]):
    """A client whose methods return the commands that they would send."""

    def decide(self, command: AnyCommand) -> AnyCommand:
        return command


def test_every_field_reaches_the_command() -> None:
    made = Made()
    fields = {"quantity": 2, "attributes": {"a": "b"}, "ticket": "t", "wait": True, "metadata": {"c": "d"}}
    assert made.grab("o", "u", id="i", **fields) == Grab(id="i", offer="o", user="u", **fields)
    assert made.pause("o", id="i", operator="p", approvals=["s"]) == Pause(
        id="i", offer="o", operator="p", approvals=("s",)
    )
    assert made.redeem("o", "g", "u", "x", id="i", quantity=3) == Redeem(
        id="i", offer="o", grab="g", user="u", order="x", quantity=3
    )


def test_field_that_is_none_is_absent() -> None:
    made = Made().grab("o", "u", id="i", quantity=None, attributes=None, metadata=None)
    assert made == Grab(id="i", offer="o", user="u")


def test_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"colour\n  Extra inputs are not permitted"):
        Made().grab("o", "u", colour="red")  # type: ignore[call-arg]
