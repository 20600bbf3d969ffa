"""The pydantic models of commands, terms, answers and events (`grabstream.models.vocabulary`)."""

from grabstream.models.vocabulary import *  # noqa: F403
