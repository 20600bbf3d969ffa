"""Checks compose.yaml and the Dockerfile without Docker: their structure, and that everything they name
exists.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from grabstream.ops.commands.local.services import CLUSTER_SERVERS
from grabstream.ops.services.servers import kafka_version
from grabstream.ops.settings import cluster_address

#: Services that run once and end.
ONE_SHOT = ("seal-key", "init", "redis-cluster", "cluster-init")

compose = yaml.safe_load(Path("compose.yaml").read_text())
services = compose["services"]
problems = []
for name in ("redis", "kafka", "postgres", "seal-key", "init", "decide", "project"):
    if name not in services:
        problems.append(f"service {name} is missing")
for name, service in services.items():
    image = service.get("image", "")
    if ":" not in image or image.endswith(":latest"):
        problems.append(f"{name}: image {image!r} names no version")
    if name not in ONE_SHOT and "healthcheck" not in service:
        problems.append(f"{name}: no healthcheck")
    for other in service.get("depends_on", {}):
        if other not in services:
            problems.append(f"{name} depends on {other}, which does not exist")
    for port in service.get("ports", []):
        if not str(port).startswith("127.0.0.1:"):
            problems.append(f"{name}: port {port} is open to everyone")
# A fresh clone has no settings, so no variable may be required. The service seal-key makes the seal key once,
# in a volume that is the working directory of every service that reads it.
if ":?" in Path("compose.yaml").read_text():
    problems.append("a variable is required (`:?`), which a fresh clone does not have")


def follows(name: str, other: str) -> bool:
    """Whether a service starts only after another service has ended successfully."""
    dependencies = services[name].get("depends_on", {})
    return any(
        dependency["condition"] == "service_completed_successfully"
        and (service == other or follows(service, other))
        for service, dependency in dependencies.items()
    )


for name, service in services.items():
    if service["image"] != "grabstream:local":
        continue
    if f"keys:{service.get('working_dir')}" not in service.get("volumes", []):
        problems.append(f"{name}: its working directory is not the volume keys")
    if name != "seal-key" and not follows(name, "seal-key"):
        problems.append(f"{name} does not start after seal-key")
    if service["environment"].get("GRAB_SEAL_KEYS", "") is not None:
        problems.append(f"{name}: GRAB_SEAL_KEYS must be passed on unchanged, and left out if it is not set")
    if f"install -d -m 700 -o grabstream {service.get('working_dir')}" not in Path("Dockerfile").read_text():
        problems.append(f"{name}: the Dockerfile does not make {service.get('working_dir')} for its user")
if "keys" not in compose["volumes"]:
    problems.append("volume keys is missing")
# The cluster: the same servers as `up --cluster` starts, each with its own volume, all in the profile
# `cluster`, and named in the settings of the workers.
for name in (*CLUSTER_SERVERS, "redis-cluster", "cluster-init", "worker-1", "worker-2", "worker-3"):
    if name not in services:
        problems.append(f"service {name} is missing")
    elif name != "postgres" and services[name].get("profiles") != ["cluster"]:
        problems.append(f"{name} is not in the profile cluster")
    for volume in services.get(name, {}).get("volumes", []):
        if volume.split(":")[0] not in compose["volumes"]:
            problems.append(f"{name}: volume {volume} is not declared")
environment = services["worker-1"]["environment"]
create_command = str(services["redis-cluster"]["command"])
for name in CLUSTER_SERVERS:
    if name.startswith("redis"):
        address = services[name]["networks"]["default"]["ipv4_address"]
        if f"{address}:6379" not in create_command or f"{name}:6379" not in environment["GRAB_REDIS_URL"]:
            problems.append(
                f"{name} ({address}) is not in the command of redis-cluster, or not in GRAB_REDIS_URL"
            )
    if name.startswith("kafka"):
        of_broker = services[name]["environment"]
        voter = f"{of_broker['KAFKA_NODE_ID']}@{name}:9093"
        if (
            voter not in of_broker["KAFKA_CONTROLLER_QUORUM_VOTERS"]
            or f"{name}:29092" not in environment["GRAB_KAFKA"]
        ):
            problems.append(f"{name} is not a voter, or not in GRAB_KAFKA")
cluster_address(environment["GRAB_REDIS_URL"])
if not kafka_version()[0].isdigit():
    problems.append(f"Kafka's version cannot be read from its image: {kafka_version()!r}")
dockerfile = Path("Dockerfile").read_text()
for line in dockerfile.splitlines():
    words = line.split()
    if words and words[0] == "COPY" and "--from" not in line:
        problems += [
            f"Dockerfile copies {path}, which does not exist"
            for path in words[1:-1]
            if not Path(path).exists()
        ]
if (
    shutil.which("docker")
    and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
):
    done = subprocess.run(
        ["docker", "compose", "config", "--quiet"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    if done.returncode != 0:
        problems.append(f"docker compose config: {done.stderr.strip()}")
for problem in problems:
    sys.stdout.write(f"compose.yaml: {problem}\n")
sys.stdout.write("" if problems else f"compose.yaml: {len(services)} services\n")
sys.exit(bool(problems))
