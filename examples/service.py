"""A service that sends commands by Kafka and gets their answers.

    python service.py OFFER USER [--id ID]

`KafkaClient` reads the whole topic of answers and picks its own; a command without an answer is sent again
with the same id, and gets its first answer. One client serves all requests of a process.
"""

import argparse
import asyncio
import uuid

from grabstream import KafkaClient, load_settings


async def main() -> None:
    """Grabs once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("offer")
    parser.add_argument("user")
    # A web service uses the id of the request, so that a repeated request is a repeated command.
    parser.add_argument("--id", default=str(uuid.uuid4()))
    words = parser.parse_args()
    settings = load_settings()
    async with KafkaClient(settings.kafka, settings.prefix) as client:
        answer = await client.grab(words.offer, words.user, id=words.id)
    print(answer.id, answer.outcome, answer.amount)


if __name__ == "__main__":
    asyncio.run(main())
