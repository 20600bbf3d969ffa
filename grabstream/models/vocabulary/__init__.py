"""Commands, terms, answers and events as pydantic models: for programs that want validation messages,
`model_dump`, JSON Schema, or FastAPI.

    command = Grab(id="g-1", offer="lunch", user="bob")
    for_the_gate = command.to_wire()        # the msgspec struct of models/commands.py
    answer = Answer.from_wire(answer_of_the_gate)

A model accepts and refuses the same values as its wire form, with the messages of the same checks, and has
the same JSON: fields with their default value are left out, even if they were given. Use `decode_commands`
for bytes of unknown origin. Frequent code uses the wire form, which is many times faster
(docs/performance.md).
"""

from grabstream.models.vocabulary.generated import *  # noqa: F403
from grabstream.models.vocabulary.generated import __all__ as __all__
