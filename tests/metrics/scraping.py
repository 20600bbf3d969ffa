"""Asks processes of tests for their metrics, and reads them as Prometheus does."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import wait_until

_listens = re.compile(r"metrics and health on port (\d+)").search


class Scraped(NamedTuple):
    """The metrics of a process: kinds by name, and values by name and labels."""

    kinds: dict[str, str]
    labels: dict[str, set[str]]
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    def value(self, name: str, **labels: str) -> float:
        """The value of one sample; 0 without it."""
        return self.values.get((name, tuple(sorted(labels.items()))), 0.0)

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels, among others."""
        wanted = set(labels.items())
        return sum(value for (of, has), value in self.values.items() if of == name and wanted <= set(has))


def port_of(log: Path, seconds: float = 60.0) -> int:
    """The port of a process' metrics, by its log."""
    wait_until(lambda: _listens(log.read_text()), seconds, "a listener for metrics")
    found = _listens(log.read_text())
    assert found
    return int(found[1])


def scrape(port: int) -> Scraped:
    """Reads /metrics."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return read(answer.read().decode())


def read(text: str) -> Scraped:
    """The metrics in a text."""
    found = Scraped({}, {}, {})
    for family in text_string_to_metric_families(text):
        found.kinds[family.name] = family.type
        for sample in family.samples:
            found.labels.setdefault(sample.name, set()).update(sample.labels)
            found.values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def ask(port: int, path: str) -> tuple[int, Any]:
    """The status and the JSON document of a path."""
    try:
        with urlopen(Request(f"http://127.0.0.1:{port}{path}"), timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())
