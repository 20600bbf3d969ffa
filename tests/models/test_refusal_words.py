"""Words of refusals, and the grab that a basket was refused with."""

import pytest

from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Grab
from grabstream.models.outcomes import Outcome
from grabstream.models.refusal_words import WHOLE_BASKET, refusal_of_basket, refused_with, words_of

GRABS: list[AnyCommand] = [Grab(id=f"b.{n}", offer=f"july:{n}", user="ann", basket="b") for n in (1, 2)]


@pytest.mark.parametrize("message", ["basket: refused at offer july:2, with grab b.2",
                                     "basket: refused with grab b.2"])  # fmt: skip
def test_basket_is_refused_with_the_grab_that_its_answers_name(message: str) -> None:
    """Also by answers that were remembered before they named the offer."""
    answers = [Answer(grab.id, "sold_out", Outcome.sold_out, grab.offer, message=message) for grab in GRABS]
    refusal, command = refusal_of_basket(answers, GRABS)
    assert (refused_with(answers[0]), refusal.id, refusal.message, command) == (
        "b.2", "b.2", WHOLE_BASKET, GRABS[1]
    )  # fmt: skip
    assert words_of(refusal, command).startswith("Nothing is left of offer july:2 (no grab of the basket")


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
