"""Boards, alerts and runbooks: a real Prometheus, which reads a worker, a gateway and two servers of Redis,
answers every query of the boards, and loads every alert.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from grabstream.metrics.catalogue import BY_NAME, METRICS
from grabstream.ops.diagnosis.examination import CHECKS
from grabstream.settings import Settings
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import Worker, make_system, until, wait_until
from tests.metrics.promql import names_in
from tests.metrics.scraping import port_of, scrape
from tests.support.gateways import GatewayProcess

pytestmark = pytest.mark.long

DEPLOY = PROJECT / "deploy"
ALERTS = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
BOARDS = {file.stem: json.loads(file.read_text()) for file in sorted((DEPLOY / "grafana").glob("*.json"))}
RUNBOOKS = (PROJECT / "docs" / "runbooks.md").read_text()
#: Labels that Prometheus adds, or that deploy/prometheus/prometheus.yaml sets.
LABELS_OF_TARGETS = {"job", "instance", "redis"}


def queries() -> dict[str, str]:
    """Every query of boards and alerts, by where it is."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in ALERTS}
    for name, board in BOARDS.items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                found[f"{name}: {panel['title']} {target['refId']}"] = target["expr"]
    return found


def tool(name: str, package: str) -> str:
    """The path of a program; without it, the test is skipped, or fails if `CI` is set."""
    found = shutil.which(name)
    if found is None:
        message = f"{name} is not installed: apt-get install {package}"
        if os.environ.get("CI"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    return found


# -- files alone ---------------------------------------------------------------------------------------------


@pytest.mark.requirement("F8")
def test_every_name_of_ours_in_a_query_is_in_the_catalogue_with_its_labels() -> None:
    used: set[str] = set()
    for where, query in queries().items():
        found = names_in(query)
        assert found.metrics, where
        allowed = set(LABELS_OF_TARGETS)
        for name, selected in found.metrics.items():
            if not name.startswith("grabstream_"):
                continue
            base = re.sub(r"_(bucket|sum|count)$", "", name) if name not in BY_NAME else name
            metric = BY_NAME[base]
            assert (base != name) == (metric.kind == "histogram"), where
            of_metric = {*metric.labels, *LABELS_OF_TARGETS, *(("le",) if base != name else ())}
            assert selected <= of_metric, where
            allowed |= of_metric
            used.add(base)
        if any(name.startswith("grabstream_") for name in found.metrics):
            assert found.grouped <= allowed, where
    # What no board shows need not be measured.
    assert {metric.name for metric in METRICS} == used


@pytest.mark.parametrize(
    ("query", "metrics", "grouped"),
    [
        (
            'sum by (a, b) (rate(x_total{c="d", e=~"f"}[5m])) / max(y) > 0.5',
            {"x_total": {"c", "e"}, "y": set()}, {"a", "b"},
        ),
        ("absent(x) or max without (i) (y) == 0", {"x": set(), "y": set()}, {"i"}),
        ("histogram_quantile(0.9, sum by (le) (rate(z_bucket[$__x])))", {"z_bucket": set()}, {"le"}),
    ],
)  # fmt: skip
def test_names_are_read_out_of_queries(query: str, metrics: dict[str, set[str]], grouped: set[str]) -> None:
    assert names_in(query) == (metrics, grouped)


def test_every_alert_has_a_runbook_in_the_words_of_the_doctor_and_every_runbook_an_alert() -> None:
    sections = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", RUNBOOKS, re.MULTILINE | re.DOTALL))
    assert list(sections) == [rule["alert"] for rule in ALERTS]
    checks = {check.name for check in CHECKS}
    for rule in ALERTS:
        name, section = rule["alert"], " ".join(sections[rule["alert"]].split())
        assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")
        said = re.match(r"\*Check: (.*?)\.\*", section)
        check = rule["labels"].get("check")
        assert (said and said[1]) == check, name
        assert check is None or check in checks, name
        assert len(section) > 100, name
    # Each check of what can be read from metrics has an alert.
    assert {rule["labels"].get("check") for rule in ALERTS} >= {
        "shards decide", "shards are relayed", "outboxes have room", "holds and offers end on time",
        "commands are read", "read models have not stopped", "read models keep up", "a verifier is running",
        "the books agree", "no decision was lost",
    }  # fmt: skip


def test_commands_in_runbooks_exist() -> None:
    from grabstream.ops.cli import VERBS

    verbs = re.findall(r"`grabstream ([a-z-]+)", RUNBOOKS)
    assert verbs
    assert set(verbs) <= set(VERBS)


def test_boards_have_places_that_do_not_overlap_and_titles_of_their_own() -> None:
    assert set(BOARDS) == {"gateway", "redis-cache", "redis-core", "system", "worker"}
    for board in BOARDS.values():
        places = [panel["gridPos"] for panel in board["panels"]]
        cells = [
            (place["x"] + x, place["y"] + y)
            for place in places
            for x in range(place["w"])
            for y in range(place["h"])
        ]
        assert len(cells) == len(set(cells))
        assert all(place["x"] + place["w"] <= 24 for place in places)
        titles = [panel["title"] for panel in board["panels"]]
        assert len(titles) == len(set(titles))


def test_promtool_takes_the_alerts_and_the_example() -> None:
    promtool = tool("promtool", "prometheus")
    for kind, file in (("rules", "alerts.yaml"), ("config", "prometheus.yaml")):
        done = subprocess.run(
            [promtool, "check", kind, str(DEPLOY / "prometheus" / file)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


# -- with a real Prometheus ----------------------------------------------------------------------------------


class Watched(NamedTuple):
    """A Prometheus, and the ports of the metrics of a worker and a gateway."""

    url: str
    worker: int
    gateway: int

    def get(self, path: str, **query: str) -> Any:
        """What Prometheus answers; raises HTTPError for a wrong query."""
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(query)}", timeout=30) as answer:
            return json.loads(answer.read())["data"]


@contextmanager
def program(*words: str, log: Path) -> Iterator[None]:
    """Runs a program while the block runs."""
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output)
        try:
            yield
        finally:
            process.kill()
            process.wait()


@pytest.fixture
async def watched(servers: Settings, settings: Settings, tmp_path: Path) -> AsyncIterator[Watched]:
    """A worker and a gateway, which a Prometheus reads, with an exporter for the core Redis and one that
    plays that of the cache.
    """
    prometheus, exporter = (
        tool("prometheus", "prometheus"), tool("prometheus-redis-exporter", "prometheus-redis-exporter")
    )  # fmt: skip
    await make_system(settings)
    own, core, cache = free_ports(3)
    with ExitStack() as stack:
        worker = Worker(
            settings, "decide,relay,sweep,project,publish,verify,webhooks", tmp_path / "worker.log",
            metrics_listen="127.0.0.1:0",
        )  # fmt: skip
        stack.callback(worker.kill)
        gateway = stack.enter_context(
            GatewayProcess(settings, tmp_path / "gateway.log", metrics_listen="127.0.0.1:0")
        )
        assert gateway.port
        ports = port_of(tmp_path / "worker.log"), port_of(tmp_path / "gateway.log")
        for port in (core, cache):
            stack.enter_context(
                program(
                    exporter, "-redis.addr", settings.redis_url, "-web.listen-address", f"127.0.0.1:{port}",
                    log=tmp_path / f"exporter-{port}.log",
                )
            )  # fmt: skip
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yaml")]
        targets = {"9464": ports[0], "9465": ports[1], "9121": core, "9122": cache}
        text = yaml.safe_dump(config)
        for named, port in targets.items():
            text = text.replace(f"127.0.0.1:{named}", f"127.0.0.1:{port}")
        (tmp_path / "prometheus.yaml").write_text(text)
        stack.enter_context(
            program(
                prometheus, f"--config.file={tmp_path}/prometheus.yaml",
                f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address=127.0.0.1:{own}", log=tmp_path / "prometheus.log",
            )
        )  # fmt: skip
        found = Watched(f"http://127.0.0.1:{own}", *ports)

        def all_read() -> bool:
            try:
                active = found.get("targets")["activeTargets"]
            except OSError:
                return False
            return len(active) == 4 and all(target["health"] == "up" for target in active)

        wait_until(all_read, 60, f"Prometheus: {(tmp_path / 'prometheus.log').read_text()[-2000:]}")
        yield found
    from grabstream.workshop.rehearsal.stage import take_down

    await take_down(settings)


async def test_a_prometheus_answers_every_query_by_names_that_running_processes_expose(
    watched: Watched,
) -> None:
    def relayed() -> bool:
        return scrape(watched.worker).value("grabstream_shards_relayed") > 0

    await until(relayed, 60, "shards")
    exposed = {name for port in (watched.worker, watched.gateway) for name in scrape(port).kinds}
    metadata = watched.get("metadata")
    for where, query in queries().items():
        watched.get("query", query=query.replace("$__rate_interval", "1m"))
        for name in names_in(query).metrics:
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            if name.startswith("grabstream_"):
                assert base.removesuffix("_total") in exposed, where
            elif name != "up":
                assert name in metadata, where
    rules = [rule for group in watched.get("rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules] == [rule["alert"] for rule in ALERTS]

    def evaluated() -> bool:
        now = [rule for group in watched.get("rules")["groups"] for rule in group["rules"]]
        return all(rule["health"] == "ok" for rule in now)

    await until(evaluated, 60, "the alerts")
    firing = {
        alert["labels"]["alertname"]
        for alert in watched.get("alerts")["alerts"]
        if alert["state"] == "firing"
    }
    # A healthy system is quiet.
    assert not firing, firing
