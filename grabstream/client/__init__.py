"""Clients: for services that send commands and ask questions, over HTTP or over Kafka.

A client makes the ids of commands, repeats requests that got no answer under the same id, and returns answers
as pydantic models (`grabstream.vocabulary`). It needs no extra.
"""
