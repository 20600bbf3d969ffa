"""Words of refusals, and the grab that a basket was refused with."""

import pytest

from grabstream.models.answers import Answer
from grabstream.models.commands import (
    Amend,
    AnyCommand,
    Grab,
    Load,
    Open,
    Pause,
    Redeem,
    Return,
    Unredeem,
    named_in_basket,
)
from grabstream.models.offers import Changes, CouponTerms
from grabstream.models.outcomes import Outcome
from grabstream.models.refusal_words import WHOLE_BASKET, refusal_of_basket, refused_with, words_of

GRABS: list[AnyCommand] = [Grab(id=f"b.{n}", offer=f"july:{n}", user="ann", basket="b") for n in (1, 2)]


def test_basket_is_refused_with_the_grab_that_its_answers_name() -> None:
    message = "basket: refused at offer july:2, with grab b.2"
    answers = [Answer(grab.id, "sold_out", Outcome.sold_out, grab.offer, message=message) for grab in GRABS]
    refusal, command = refusal_of_basket(answers, GRABS)
    assert (refused_with(answers[0]), refusal.id, refusal.message, command) == (
        "b.2", "b.2", WHOLE_BASKET, GRABS[1]
    )  # fmt: skip
    assert words_of(refusal, command).startswith("Nothing is left of offer july:2 (the basket was refused")


def test_basket_whose_answers_name_no_grab_is_refused_with_the_first_refusal() -> None:
    answers = [Answer("b.1", "granted", 0, "july:1"), Answer("b.2", "over", Outcome.over, "july:2")]
    assert refusal_of_basket(answers, GRABS) == (answers[1], GRABS[1])
    assert refused_with(answers[1]) is None


def test_part_that_was_taken_has_its_unit() -> None:
    answer = Answer("g", "already_taken", Outcome.already_taken, "o", amount=412, place=3)
    assert "412 minor units, at place 3" in words_of(answer, Grab(id="g", offer="o", user="ann"))


def test_id_of_a_command_has_the_name_that_its_sender_knows() -> None:
    grab, answer = GRABS[0], Answer("b.1", "busy", Outcome.busy, "july:1")
    assert words_of(answer, grab).endswith("with the same id.")
    assert words_of(answer, grab, "Idempotency-Key").endswith("with the same Idempotency-Key.")


def test_repeated_refusal_speaks_of_the_past_and_claims_no_reason() -> None:
    """Only outcome and time are remembered, and the offer may have changed since."""
    grab = Grab(id="sn-1", offer="soon", user="ann")
    for outcome in ("not_open_yet", "on_hold", "no_such_offer", "sold_out", "limit_reached"):
        answer = Answer("sn-1", outcome, Outcome[outcome], "soon", repeated=True, at=1_700_000_000_000)  # type: ignore[arg-type]
        words = words_of(answer, grab, "Idempotency-Key")
        assert words.startswith("This is the answer that Idempotency-Key sn-1 got before at 2023-11-14"), (
            words
        )
        assert words.endswith("a new attempt needs a new Idempotency-Key.")
        assert "a list" not in words
        assert " is " not in words[20:], words


def test_every_refusal_that_is_remembered_has_words_for_its_repeat() -> None:
    never = {"invalid", "fenced", "busy", "conflict", "already_taken"}
    commands: list[AnyCommand] = [
        Grab(id="g", offer="o", user="ann"),
        Return(id="r", offer="o", grab="g", user="ann"),
        Redeem(id="u", offer="o", grab="g", user="ann", order="n"),
        Unredeem(id="v", offer="o", grab="g", user="ann", order="n"),
    ]
    for outcome in Outcome:
        if not outcome.positive and outcome.name not in never:
            for command in commands:
                answer = Answer(command.id, outcome.name, outcome, "o", repeated=True)  # type: ignore[arg-type]
                assert "needs a new id" in words_of(answer, command), outcome


def test_return_of_redeemed_units_names_the_way_out() -> None:
    command = Return(id="r", offer="o", grab="g", user="ann")
    none, few = (
        Answer("r", "not_enough_left", Outcome.not_enough_left, "o", left=left) for left in (0, 1)
    )  # fmt: skip
    assert "its units are redeemed; unredeem first" in words_of(none, command)
    three = Return(id="r", offer="o", grab="g", user="ann", quantity=3)
    assert words_of(few, three).startswith("3 units were requested, 1 of grab g can be returned")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (Load(id="c", offer="o", what="codes", chunk=2, chunks=3, items=("x",)),
         "chunk 2 of the codes of offer o is loaded"),
        (GRABS[0], "the basket b was decided before with other grabs"),
        (Redeem(id="c", offer="o", grab="g", order="n", quantity=2),
         "order n used another quantity of grab g"),
        (Open(id="c", offer="o", terms=CouponTerms(issuer="shop", total=1)),
         "there is an offer o, or was one"),
        (Pause(id="c", offer="o"), "The id c was used before, with another body."),
        (Grab(id="g", offer="o", user="ann"), "or for the grab of another user"),
    ],
)  # fmt: skip
def test_a_conflict_names_each_thing_that_its_command_may_collide_with(
    command: AnyCommand, words: str
) -> None:
    """For some commands, the id may never have been used."""
    said = words_of(Answer(command.id, "conflict", Outcome.conflict, command.offer), command)
    assert words in said
    assert said.endswith("needs another id; this does not change with time.")


def test_a_total_below_what_is_taken_is_told_as_that() -> None:
    command = Amend(id="c", offer="o", changes=Changes(total=1))
    answer = Answer("c", "not_enough_left", Outcome.not_enough_left, "o", left=2)
    assert words_of(answer, command) == (
        "The total of offer o cannot be 1: units that are left and can be taken out of it: 2."
    )


def test_a_basket_that_lacks_the_last_grabs_has_the_ids_and_bodies_of_the_rest() -> None:
    """So it repeats them; one that lacks the first has other bodies under their ids."""
    whole = [Grab(id="k", offer=f"july:{n}", user="ann") for n in (1, 2, 3)]
    named = named_in_basket(whole, "k")
    assert named_in_basket(whole[:2], "k") == named[:2]
    first, *_ = named_in_basket(whole[1:], "k")
    assert (first.id, first.offer) == ("k.1", "july:2")
