"""Keys that change while a process runs: the files of settings such as GRAB_PAYMENT_KEYS_FILE are reread, so
that a key is added, moved to the front and removed without a restart (docs/operating.md).

Seal keys are not among them: what a process encrypts with a key that the system does not know could not be
read, so `init` and the start of each process compare seal keys first.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from pydantic import SecretStr

from grabstream.crypto.encryption import EncryptionKey
from grabstream.crypto.signing import PublicKeys, SigningKeys
from grabstream.crypto.tickets import TicketKeys
from grabstream.runtime.ticks import seconds_to_tick
from grabstream.settings import BadSettings, Settings, content_of, files_of, listed, variable_of
from grabstream.streams.journal_keys import JournalKeys, journal_keys, use_keys

log: Final = logging.getLogger(__name__)

CHECK_SECONDS: Final = 5.0
_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "payment_keys": lambda text: SigningKeys.from_text("GRAB_PAYMENT_KEYS", text),
    "payment_encryption_key": lambda text: EncryptionKey.from_text("GRAB_PAYMENT_ENCRYPTION_KEY", text),
    "operator_keys": lambda text: PublicKeys.from_text("GRAB_OPERATOR_KEYS", text),
    "ticket_keys": TicketKeys.from_text,
}
_JOURNAL: Final = ("journal_keys", "journal_public_keys")
#: The settings whose files are used or refused together.
_TOGETHER: Final = (*((field,) for field in _READERS), _JOURNAL)
#: The settings whose files are read again.
FIELDS: Final = (*_READERS, *_JOURNAL)

_in_use: Final[dict[str, WeakSet[Any]]] = {field: WeakSet() for field in _READERS}


class _Content(NamedTuple):
    """What a file has, or why it cannot be read."""

    text: str
    problem: str = ""


def keys_of(settings: Settings, field: str) -> Any:
    """The keys of a setting, None or an empty collection without any; `KeyFiles` replaces them when their
    file changes. Raises ValueError that names the setting when they cannot be read.
    """
    keys = _READERS[field](_text_of(settings, field))
    if keys is not None:
        _in_use[field].add(keys)
    return keys


class KeyFiles:
    """The files of keys that the settings of this process name. The settings themselves are not reread."""

    def __init__(self, settings: Settings) -> None:
        self._files = files_of(FIELDS)
        self._journal = {field: _text_of(settings, field) for field in _JOURNAL}
        self._read = self._contents()
        #: The settings whose file was changed to what cannot be used; the keys before it stay in use.
        self.refused: dict[str, str] = {}

    async def keep_fresh(self, stop: asyncio.Event) -> None:
        """Reads files that have changed, until `stop`."""
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds_to_tick(CHECK_SECONDS) if self._files else None):
                    await stop.wait()
            self.refresh()

    def refresh(self) -> None:
        """Uses the keys of files that have changed. For an unusable file, the reason is logged once."""
        before, self._read = self._read, self._contents()
        for fields in _TOGETHER:
            changed = [field for field in fields if self._read.get(field) != before.get(field)]
            if not changed:
                continue
            names = ", ".join(f"{variable_of(field)}_FILE" for field in changed)
            try:
                self._use(fields)
            except Exception as error:  # whatever is in a file, its process continues
                self.refused.update(dict.fromkeys(changed, str(error)))
                log.error(
                    "%s has changed, but cannot be used; the previous keys stay in use: %s", names, error
                )
                continue
            for field in fields:
                self.refused.pop(field, None)
            log.info("%s has changed; its keys are now in use", names)

    def _use(self, fields: Sequence[str]) -> None:
        texts = {}
        for field in fields:
            if (content := self._read.get(field)) is None:
                continue
            if content.problem:
                raise BadSettings(content.problem)
            if not listed(content.text):
                raise BadSettings("it contains no key")
            texts[field] = content.text
        if fields == _JOURNAL:
            _use_of_journal(self._journal | texts)
            return
        [field] = fields
        keys = _READERS[field](texts[field])
        for held in _in_use[field]:
            held.replace(keys)

    def _contents(self) -> dict[str, _Content]:
        return {field: self._content(field) for field in self._files}

    def _content(self, field: str) -> _Content:
        try:
            return _Content(content_of(f"{variable_of(field)}_FILE", self._files[field]))
        except BadSettings as error:
            return _Content("", str(error))


def _use_of_journal(texts: Mapping[str, str]) -> None:
    """Raises BadSettings when this process would no longer sign, or would ignore records that count."""
    now, keys = journal_keys(), JournalKeys.from_text(*(texts[field] for field in _JOURNAL))
    if now.signer is not None and keys.signer is None:
        raise BadSettings("it contains no key that signs")
    if lost := [key_id for key_id, key in now.public.items() if keys.public.get(key_id) != key]:
        raise BadSettings(
            f"the public key {', '.join(lost)} is missing in it, or differs: the records that it signed "
            "would no longer count; append new keys to GRAB_JOURNAL_PUBLIC_KEYS"
        )
    use_keys(keys)


def _text_of(settings: Settings, field: str) -> str:
    value = getattr(settings, field)
    return value.get_secret_value() if isinstance(value, SecretStr) else value
