"""The pages for people: their files, read once at start. They contain no data: they call the same routes as
every other client, and insert the answers as text. Settings that the page of an offer needs are attributes of
its root.
"""

import html
import re
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from grabstream.gateway.caching import tag_of
from grabstream.gateway.problems import Header, Problem, Reply
from grabstream.gateway.requests import Request, query_of

_FOLDER: Final = Path(__file__).parent / "page"
_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
#: Where the root of the page of an offer has the attributes of the settings.
_SETTINGS: Final = b'<html lang="en">'
_is_host = re.compile(r"[A-Za-z0-9.:\[\]-]+").fullmatch


def policy_of(*sources: bytes) -> bytes:
    """The Content-Security-Policy of a page. Scripts, styles and answers come from the gateway alone, answers
    also from `sources`; nothing inline, no frame, no form that is sent, no text turned into elements by a
    script.
    """
    return (
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src %b; img-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        b"require-trusted-types-for 'script'; trusted-types 'none'"
    ) % b" ".join((b"'self'", *sources))


POLICY: Final = policy_of()
_HEADERS: Final[tuple[Header, ...]] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=()"),
    # Asked for again each time, and not sent again while it is the same: a new release is seen at once.
    (b"cache-control", b"no-cache"),
)


class Pages:
    """The handlers of the files of the pages. The page of an offer pays at `pay_url`, if there is one. Raises
    ValueError for an address whose host no policy can name.
    """

    def __init__(self, is_authenticated: bool = False, pay_url: str | None = None) -> None:
        self._files = {
            path.name: (path.read_bytes(), _TYPES[path.suffix])
            for path in sorted(_FOLDER.iterdir())
            if path.suffix in _TYPES
        }
        settings = {"data-authentication": "required" if is_authenticated else "none"}
        self._offer_policy = POLICY
        if pay_url is not None:
            address = urlsplit(pay_url)
            if not _is_host(address.netloc):
                raise ValueError(f"a Content-Security-Policy cannot name the host {address.netloc}")
            settings["data-pay"] = pay_url
            self._offer_policy = policy_of(f"{address.scheme}://{address.netloc}".encode())
        page, kind = self._files["take.html"]
        attributes = "".join(f' {name}="{html.escape(value)}"' for name, value in settings.items())
        assert page.count(_SETTINGS) == 1
        self._files["take.html"] = (
            page.replace(_SETTINGS, b"%b%b>" % (_SETTINGS[:-1], attributes.encode())),
            kind,
        )
        self._tags = {name: tag_of(content) for name, (content, _) in self._files.items()}

    async def page(self, request: Request, body: bytes) -> Reply:
        """GET /"""
        query_of(request, ())
        return self._file(request, "index.html")

    async def offer_page(self, request: Request, body: bytes) -> Reply:
        """GET /o/{offer}"""
        query_of(request, ())
        return self._file(request, "take.html")

    async def page_file(self, request: Request, body: bytes) -> Reply:
        """GET /ui/{file}"""
        query_of(request, ())
        return self._file(request, request.path["file"])

    def _file(self, request: Request, name: str) -> Reply:
        found = self._files.get(name)
        if found is None:
            raise Problem("not_found", "The page has no such file.")
        content, kind = found
        policy = self._offer_policy if name == "take.html" else POLICY
        headers = ((b"etag", self._tags[name]), (b"content-security-policy", policy), *_HEADERS)
        if (request.header(b"if-none-match") or b"").removeprefix(b"W/") == self._tags[name]:
            return Reply(304, b"", headers)
        return Reply(200, content, ((b"content-type", kind), *headers))
