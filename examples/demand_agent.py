"""Counts the grabs of every offer by minute, live: a Faust agent with a windowed table.

    python demand_agent.py worker --without-web -l warn

reads `grab.events`, and writes how many grabs an offer has had in a minute to the topic `grab.demand`: a
record replaces the ones before it of the same offer and minute. It counts for people who watch. After a
crash, a count may be wrong by some grabs: the books are in PostgreSQL, and a projection counts each event
exactly once (docs/recipes.md, "Faust").
"""

import asyncio
import json
import logging
import os
import tempfile
import time

import faust
from aiokafka.admin import NewTopic

from grabstream import load_settings
from grabstream.streams.topics import make_topics

MINUTE_SECONDS = 60
#: Counts of minutes that are older leave the table, so their events are not counted.
KEPT_SECONDS = 3_600

settings = load_settings()
app = faust.App(
    f"{settings.prefix}.demand",
    broker=";".join(f"kafka://{server}" for server in settings.kafka.split(",")),
    store="memory://",  # the tables are read again from their changelog topics at a start
    topic_partitions=settings.shards,  # a table has the partitions of the topic that it is made from
    topic_disable_leader=True,
    consumer_auto_offset_reset="earliest",
    datadir=tempfile.gettempdir(),
)
events = app.topic(f"{settings.prefix}.events", key_serializer="raw", value_serializer="raw")
demand = app.topic(f"{settings.prefix}.demand", key_serializer="raw", value_serializer="raw")
last_seq = app.Table("last-seq", default=int)
grabs = app.Table("grabs", default=int).tumbling(MINUTE_SECONDS, expires=KEPT_SECONDS).relative_to_stream()


async def create_topics():
    """Creates the topic of counts and the changelogs of the tables: in all of them, a record replaces the
    ones before it with its key. Returns when the brokers know them. Faust creates changelogs too, but its
    agents may begin before it knows their partitions: then each record fails and is skipped permanently.
    """
    names = [demand.get_topic_name()] + [
        table.changelog_topic.get_topic_name() for table in (last_seq, grabs.table)
    ]
    copies = app.conf.topic_replication_factor
    configs = {"cleanup.policy": "compact"}
    await make_topics(
        settings.kafka, [NewTopic(name, settings.shards, copies, topic_configs=configs) for name in names]
    )


@app.agent(events)
async def count(stream):
    """Counts each grab in the minute in which it was decided, which is the time of its record."""
    async for record in stream.events():
        try:
            await count_one(json.loads(record.value))
        except Exception:
            # Faust would acknowledge the record and continue. Since the process ends here, the record is read
            # again at the next start.
            logging.exception("record %d of partition %d", record.message.offset, record.message.partition)
            os._exit(1)


async def count_one(event):
    """Counts an event if it is a grab that has not been counted, and writes the new count."""
    if event["seq"] <= last_seq[event["shard"]]:
        return  # the publisher may repeat a record
    last_seq[event["shard"]] = event["seq"]
    if event["type"] not in ("grab.granted", "grab.held"):
        return
    if event["at"] / 1000 < time.time() - KEPT_SECONDS:
        return
    offer, minute_ms = event["offer"], MINUTE_SECONDS * 1000
    grabs[offer] += 1
    counted = {
        "offer": offer,
        "minute": event["at"] // minute_ms * minute_ms,  # milliseconds since 1970 UTC
        "grabs": grabs[offer].value(),
    }
    await demand.send(key=offer.encode(), value=json.dumps(counted).encode())


if __name__ == "__main__":
    asyncio.run(create_topics())
    app.main()
