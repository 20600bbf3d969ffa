"""An S3-compatible server as a separate process (moto), which verifies signatures and rights of its users,
knows conditional PUTs, keeps versions, and locks objects. And servers that trouble a client.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import boto3

from grabstream.streams.buckets import StoreLogin
from grabstream.workshop.services import free_ports
from tests.conftest import wait_until

REGION: Final = "eu-central-1"
#: Keys in a page of a listing. Stores have 1,000: with fewer, every test reads several pages.
PAGE_KEYS: Final = 3
_EVERYTHING: Final = ("s3:*",)


class ObjectStore:
    """A running server; `login` is that of a user who may do everything in it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._iam = boto3.client(
            "iam", endpoint_url=endpoint, region_name=REGION, aws_access_key_id="root",
            aws_secret_access_key="root",
        )  # fmt: skip
        self.login = self.user(*_EVERYTHING)
        self.reader = self.user("s3:GetObject", "s3:GetObjectVersion", "s3:ListBucket")
        self.writer = self.user("s3:PutObject")
        # From now on, signatures and rights are verified.
        request = urllib.request.Request(
            f"{endpoint}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request, timeout=240).close()

    def user(self, *rights: str) -> StoreLogin:
        name = f"user{secrets.token_hex(4)}"
        self._iam.create_user(UserName=name)
        policy = {
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Action": list(rights), "Resource": "*"}],
        }
        self._iam.put_user_policy(UserName=name, PolicyName="all", PolicyDocument=json.dumps(policy))
        key = self._iam.create_access_key(UserName=name)["AccessKey"]
        return StoreLogin(self.endpoint, REGION, key["AccessKeyId"], key["SecretAccessKey"])

    @property
    def client(self) -> Any:
        """A client that is not that of the product."""
        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name=REGION, aws_access_key_id=self.login.access_key,
            aws_secret_access_key=self.login.secret_key,
        )  # fmt: skip

    def bucket(self, locks: bool = False) -> str:
        """The name of a new bucket."""
        name = f"bucket-{secrets.token_hex(5)}"
        self.client.create_bucket(
            Bucket=name, ObjectLockEnabledForBucket=locks,
            CreateBucketConfiguration={"LocationConstraint": REGION},
        )  # fmt: skip
        return name

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return sorted(one["Key"] for page in pages for one in page.get("Contents", ()))

    def download(self, bucket: str, prefix: str, folder: Path) -> Path:
        """All objects under a prefix, as files of a folder."""
        client = self.client
        for key in self.keys(bucket, prefix):
            path = folder / key.removeprefix(prefix).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())
        return folder


def env_of_store(login: StoreLogin, **more: str) -> dict[str, str]:
    """The settings of a store as arguments of `grabstream()` and `child_environment()`."""
    return {
        "s3_endpoint": login.endpoint, "s3_region": login.region, "s3_access_key": login.access_key,
        "s3_secret_key": login.secret_key,
    } | more  # fmt: skip


@contextmanager
def running_store(folder: Path) -> Iterator[ObjectStore]:
    """A server, which ends with the block."""
    [port] = free_ports(1)
    log = folder / "store.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "moto.server", "-p", str(port)]
        environment = os.environ | {"MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE_KEYS)}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until(lambda: _answers(process, port, log), 120, "the object store listens")
        yield ObjectStore(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def _answers(process: "subprocess.Popen[bytes]", port: int, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


@contextmanager
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class _Forwarding(BaseHTTPRequestHandler):
    """Hands requests on, and answers with headers that `changed` has changed, unless `drops` says not to."""

    protocol_version = "HTTP/1.1"
    target: str
    drops: Any

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        # Without a type, urllib would say that it is a form.
        headers = {"Content-Type": "application/octet-stream"} | dict(self.headers.items())
        headers.pop("Expect", None)
        request = urllib.request.Request(self.target + self.path, body or None, headers, method=self.command)
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                status, given, content = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            status, given, content = error.code, error.headers, error.read()
        if self.drops(self.command, self.path, status):
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in self.changed(given.items()):
            if name.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    changed: Any = staticmethod(lambda headers: headers)
    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""


@contextmanager
def proxy(
    store: ObjectStore,
    drops: Any = lambda method, path, status: False,
    changed: Any = lambda headers: headers,
) -> Iterator[str]:
    """The address of a proxy before a store: it does not answer where `drops` is true, although the store has
    served the request; and `changed` changes the headers of answers.
    """
    words = {"target": store.endpoint, "drops": staticmethod(drops), "changed": staticmethod(changed)}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Forwarding,), words))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
