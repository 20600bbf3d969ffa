"""An issuer of tokens for services, by the client credentials grant of OAuth 2.0, and a server of its keys.
It runs in a thread, since a broker asks for the keys while a test waits for the broker.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs

from tests.support.issuer import key_set, token

#: The secret of every client.
SECRET: Final = "a secret of a client"
#: The keys that brokers get.
KEYS: Final = ("rsa", "p256")


class Issuer:
    """Issues tokens whose subject is the client. `changed` are claims that replace its own, `key_id` the key
    that signs; `issued` counts.
    """

    def __init__(self, port: int) -> None:
        self._at = f"http://127.0.0.1:{port}"
        self.reset()

    def reset(self) -> None:
        """Issues good tokens again."""
        self.changed: dict[str, Any] = {}
        self.key_id = "rsa"
        self.issued = 0

    @property
    def keys_url(self) -> str:
        """Where its keys are."""
        return f"{self._at}/keys"

    @property
    def token_url(self) -> str:
        """Where it issues tokens."""
        return f"{self._at}/token"

    def issue(self, client: str) -> dict[str, Any]:
        """The answer to a client."""
        self.issued += 1
        return {"access_token": token(client, self.key_id, **self.changed), "expires_in": 600}


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/keys" else 404, json.loads(key_set(*KEYS)))

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        login = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
        client, _, secret = login.partition(":")
        if self.path != "/token" or form["grant_type"] != ["client_credentials"]:
            self._answer(400, {"error": "unsupported_grant_type"})
        elif secret != SECRET:
            self._answer(401, {"error": "invalid_client"})
        else:
            self._answer(200, self.server.issuer.issue(client))

    def _answer(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""


class _Server(ThreadingHTTPServer):
    issuer: Issuer


@contextmanager
def issuing() -> Iterator[Issuer]:
    """A running issuer."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.issuer = Issuer(server.server_port)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.issuer
        finally:
            server.shutdown()
            thread.join()
