"""The classic way, as articles describe it: one script with a list of free parts, a list of taken parts, and
a map of users who have one; and one thread that writes the taken parts to the database in batches.
"""

import json
import subprocess
from collections.abc import Iterator, Sequence

import psycopg
import redis

SCRIPT = """
if redis.call('hexists', KEYS[3], ARGV[1]) ~= 0 then return nil end
local envelope = redis.call('rpop', KEYS[1])
if envelope then
  local part = cjson.decode(envelope)
  part['userId'] = ARGV[1]
  local taken = cjson.encode(part)
  redis.call('hset', KEYS[3], ARGV[1], ARGV[1])
  redis.call('lpush', KEYS[2], taken)
  return taken
end
return nil
"""
KEYS = ("parts", "taken", "users")
UPDATER_BATCH = 1_000


def prepare(client: "redis.Redis", parts: int, id_length: int) -> str:
    """Fills the list of free parts and returns the script's SHA-1."""
    client.delete(*KEYS)
    for start in range(0, parts, 2_000):
        values = [
            json.dumps({"id": f"{number:0{id_length}d}", "money": 100 + number % 100}, separators=(",", ":"))
            for number in range(start, min(start + 2_000, parts))
        ]
        client.lpush(KEYS[0], *values)
    return str(client.script_load(SCRIPT))


def pipelined(
    port: int, sha: str, grabs: int, id_length: int, wait: bool = True, more: Sequence[str] = ()
) -> "subprocess.Popen[str]":
    """Calls the script, with a random user in each call."""
    call = ("EVALSHA", sha, "3", *KEYS, random_user(id_length), *more)
    return benchmarked(port, grabs, call, wait)


def random_user(id_length: int) -> str:
    """A user for redis-benchmark, which draws another one for each place in each call."""
    return "u" * (id_length - 12) + "__rand_int__"


def benchmarked(port: int, calls: int, call: Sequence[str], wait: bool = True) -> "subprocess.Popen[str]":
    """Runs redis-benchmark, the fastest client: 20 connections, pipelines of 32 calls."""
    command = [
        "redis-benchmark",
        "-p",
        str(port),
        "-n",
        str(calls),
        "-r",
        "100000000000",
        "-P",
        "32",
        "-c",
        "20",
        "--csv",
    ]
    process = subprocess.Popen([*command, *call], stdout=subprocess.PIPE, text=True)
    if wait:
        process.wait()
    return process


def rate_of(process: "subprocess.Popen[str]") -> float:
    """The requests per second that redis-benchmark printed."""
    assert process.stdout is not None
    return float(process.stdout.read().strip().splitlines()[-1].split('","')[1].strip('"'))


def update_database(port: int, postgres: str, schema: str, grabs: int) -> Iterator[int]:
    """The updater: takes batches from the list of taken parts, writes rows and balances, commits; yields the
    number of grabs written so far.
    """
    client = redis.Redis(port=port)
    done = 0
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'.encode())
        connection.execute(f'SET search_path TO "{schema}"'.encode())
        connection.execute("DROP TABLE IF EXISTS classic_grabs, classic_balances")
        connection.execute(
            "CREATE TABLE classic_grabs (id text PRIMARY KEY, user_id text NOT NULL, money bigint NOT NULL)"
        )
        connection.execute("CREATE TABLE classic_balances (user_id text PRIMARY KEY, money bigint NOT NULL)")
        while done < grabs:
            taken = client.rpop(KEYS[1], UPDATER_BATCH)
            if not taken:
                yield done
                continue
            rows = [json.loads(value) for value in taken]
            users: dict[str, int] = {}
            for row in rows:
                users[row["userId"]] = users.get(row["userId"], 0) + row["money"]
            with connection.transaction():
                with connection.cursor().copy("COPY classic_grabs FROM STDIN") as copy:
                    copy.write("".join(f"{row['id']}\t{row['userId']}\t{row['money']}\n" for row in rows))
                connection.execute(
                    "INSERT INTO classic_balances AS b SELECT * FROM unnest(%s::text[], %s::bigint[]) "
                    "ON CONFLICT (user_id) DO UPDATE SET money = b.money + excluded.money",
                    (list(users), list(users.values())),
                )
            done += len(rows)
            yield done
