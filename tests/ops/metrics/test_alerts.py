"""When alerts fire: by the tests of rules of Prometheus' own tool."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.ops.metrics.test_boards import ALERTS, DEPLOY, tool

SHARDS = {"grabstream_shards{instance='a'}": "2x40"}


def relayed(instance: str, shard: int, values: str) -> dict[str, str]:
    """Whether a worker relays a shard, every 15 s."""
    return {f"grabstream_shard_relayed{{instance='{instance}',shard='{shard}'}}": values}


@pytest.mark.parametrize(
    ("alert", "series", "fires"),
    [
        ("NotRelayed", SHARDS | relayed("a", 0, "1x40") | relayed("b", 1, "1x40"), False),
        # Two workers believe that they have the lease of one shard, and nobody has that of the other.
        ("NotRelayed", SHARDS | relayed("a", 0, "1x40") | relayed("b", 0, "0x40"), True),
        # The worker that had it is gone.
        ("NotRelayed", SHARDS | relayed("a", 0, "1x40") | relayed("b", 1, "1x10"), True),
        ("NotRelayed", SHARDS, True),
        ("DoNotDecide", SHARDS | relayed("a", 0, "1x40") | relayed("b", 1, "1x40"), False),
        ("DoNotDecide", SHARDS | relayed("a", 0, "1x40") | relayed("b", 1, "0x40"), True),
        # Its relay takes over and fails, again and again.
        ("DoNotDecide", SHARDS | relayed("a", 0, "1x40") | relayed("b", 1, "1 0 1 " * 13 + "1"), True),
        # A takeover, as after each restart, is no trouble.
        ("DoNotDecide", SHARDS | relayed("a", 0, "1x40") | relayed("b", 1, "1x31 0 1x8"), False),
        # A worker that lost the lease and does not know it yet hides nothing, and is no trouble.
        ("DoNotDecide", SHARDS | relayed("a", 0, "1x40") | relayed("b", 0, "0x40"), False),
    ],
)
def test_alerts_of_relays_count_shards(
    tmp_path: Path, alert: str, series: dict[str, str], fires: bool
) -> None:
    [rule] = [rule for rule in ALERTS if rule["alert"] == f"GrabstreamShards{alert}"]
    annotations = {name: text.replace("{{ $value }}", "1") for name, text in rule["annotations"].items()}
    expected = [{"exp_labels": rule["labels"], "exp_annotations": annotations}] if fires else []
    test = {
        "rule_files": [str(DEPLOY / "prometheus" / "alerts.yaml")],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": "9m", "alertname": rule["alert"], "exp_alerts": expected},
                ],
            }
        ],
    }
    file = tmp_path / "alert.yaml"
    file.write_text(yaml.safe_dump(test))
    promtool = tool("promtool", "prometheus")
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
