"""When alerts fire: by the tests of rules of Prometheus' own tool."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.metrics.test_boards import ALERTS, DEPLOY, tool

SHARDS = {"grabstream_shards{instance='a'}": "2x40"}


def relayed(instance: str, shard: int, values: str) -> dict[str, str]:
    """Whether a worker relays a shard, every 15 s."""
    return {f"grabstream_shard_relayed{{instance='{instance}',shard='{shard}'}}": values}


@pytest.mark.parametrize(
    ("alert", "series", "fires"),
    [
        ("NotRelayed", SHARDS | relayed("a", 0, "1x40") | relayed("b", 1, "1x40"), False),
        # Two workers believe that they have the lease of one shard, and none has that of the other.
        ("NotRelayed", SHARDS | relayed("a", 0, "1x40") | relayed("b", 0, "0x40"), True),
        # The worker that had it is gone.
        ("NotRelayed", SHARDS | relayed("a", 0, "1x40") | relayed("b", 1, "1x10"), True),
        ("NotRelayed", SHARDS, True),
        ("DoNotDecide", SHARDS | relayed("a", 0, "1x40") | relayed("b", 1, "1x40"), False),
        ("DoNotDecide", SHARDS | relayed("a", 0, "1x40") | relayed("b", 1, "0x40"), True),
        # Its relay takes over and fails, again and again.
        ("DoNotDecide", SHARDS | relayed("a", 0, "1x40") | relayed("b", 1, "1 0 1 " * 13 + "1"), True),
        # A takeover, as after each restart, is not a fault.
        ("DoNotDecide", SHARDS | relayed("a", 0, "1x40") | relayed("b", 1, "1x31 0 1x8"), False),
        # A worker that lost the lease and does not know it yet hides nothing, and is not a fault.
        ("DoNotDecide", SHARDS | relayed("a", 0, "1x40") | relayed("b", 0, "0x40"), False),
    ],
)
def test_alerts_of_relays_count_shards(
    tmp_path: Path, alert: str, series: dict[str, str], fires: bool
) -> None:
    assert_fires(tmp_path, f"GrabstreamShards{alert}", series, 15, 9, fires)


LOST, UNSIGNED, ERRORS = (
    "grabstream_lost_decisions_total{job='x'}", "grabstream_projection_ignored_records_total",
    "grabstream_http_requests_total{status='500'}",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("alert", "series", "values", "minutes", "fires"),
    [
        # A worker that recovers a shard as soon as it starts has the number before it is first asked.
        ("DecisionsLost", LOST, "_x120 3x20", 121, True),
        ("DecisionsLost", LOST, "_x120 3x99", 190, False),
        ("DecisionsLost", LOST, "0x120 1x20", 122, True),
        ("DecisionsLost", LOST, "_x120 0x20", 122, False),
        ("RecordsNotSigned", UNSIGNED, "0x9 1x9", 10, True),
        ("RecordsNotSigned", UNSIGNED, "0x9 0x9", 10, False),
        ("GatewayErrors", ERRORS, "0x9 1x9", 10, True),
        ("GatewayErrors", ERRORS, "0x9 0x9", 10, False),
    ],
)
def test_alerts_fire_at_the_first_event(
    tmp_path: Path, alert: str, series: str, values: str, minutes: int, fires: bool
) -> None:
    assert_fires(tmp_path, f"Grabstream{alert}", {series: values}, 60, minutes, fires)


def of_redis(name: str, appends: int, replicas: int) -> dict[str, str]:
    """What a Redis that decides, or its replica, says of itself."""
    labels = f"{{redis='core',instance='{name}'}}"
    return {
        f"redis_aof_enabled{labels}": f"{appends}x20",
        f"redis_connected_slaves{labels}": f"{replicas}x20",
    }


@pytest.mark.parametrize(
    ("series", "fires"),
    [
        (of_redis("a", 1, 0), None), (of_redis("a", 0, 0), "a"),
        # A master may leave the file to its replica, but not a replica that has none either.
        (of_redis("a", 0, 1) | of_redis("b", 1, 0), None), (of_redis("a", 0, 1) | of_redis("b", 0, 0), "b"),
        ({"redis_aof_last_write_status{redis='core',instance='a'}": "0x20"}, "a"),
    ],
)  # fmt: skip
def test_the_alert_of_the_file_knows_one_on_the_replica(
    tmp_path: Path, series: dict[str, str], fires: str | None
) -> None:
    labels = {"redis": "core", "instance": fires or ""}
    assert_fires(tmp_path, "GrabstreamRedisCannotWrite", series, 60, 9, fires is not None, labels)


def assert_fires(
    folder: Path,
    alert: str,
    series: dict[str, str],
    every_seconds: int,
    minutes: int,
    fires: bool,
    labels: dict[str, str] | None = None,
) -> None:
    """An alert fires after a number of minutes or not, when Prometheus reads these values; with these labels
    in addition to those of its rule.
    """
    [rule] = [rule for rule in ALERTS if rule["alert"] == alert]
    instance = (labels or {}).get("instance", "")
    annotations = {
        name: text.replace("{{ $value }}", "1").replace("{{ $labels.instance }}", instance)
        for name, text in rule["annotations"].items()
    }
    all_labels = rule["labels"] | (labels or {})
    expected = [{"exp_labels": all_labels, "exp_annotations": annotations}] if fires else []
    test = {
        "rule_files": [str(DEPLOY / "prometheus" / "alerts.yaml")],
        "evaluation_interval": f"{every_seconds}s",
        "tests": [
            {
                "interval": f"{every_seconds}s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": f"{minutes}m", "alertname": alert, "exp_alerts": expected},
                ],
            }
        ],
    }
    file = folder / "alert.yaml"
    file.write_text(yaml.safe_dump(test))
    promtool = tool("promtool", "prometheus")
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
