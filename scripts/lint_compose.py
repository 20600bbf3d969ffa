"""Checks compose.yaml and the Dockerfile without Docker: their structure, and that everything they name
exists.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import yaml

from grabstream.settings import Settings, cluster_address, host_and_port
from grabstream.workshop.commands.services import CLUSTER_SERVERS
from grabstream.workshop.services.container_files import Places, write
from grabstream.workshop.services.servers import kafka_version

#: Services that run once and end.
ONE_SHOT = ("seal-key", "init", "redis-cluster", "cluster-init", "certificates", "init-secure")
#: The services of the profile `secure`.
SECURED = (
    "certificates", "redis-secure", "kafka-secure", "postgres-secure", "init-secure", "worker-secure",
    "gateway-secure",
)  # fmt: skip

compose = yaml.safe_load(Path("compose.yaml").read_text())
services = compose["services"]
problems = []
for name in ("redis", "cache", "kafka", "postgres", "seal-key", "init", "decide", "project", "gateway"):
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
    if service.get("command", [""])[0] in ("worker", "gateway"):
        port = host_and_port(service["environment"].get("GRAB_METRICS_LISTEN", ":"))[1]
        if f"http://127.0.0.1:{port}/health/ready" not in str(service["healthcheck"]["test"]):
            problems.append(f"{name}: its healthcheck does not ask its own /health/ready")
    if not service.get("read_only") or service.get("cap_drop") != ["ALL"]:
        problems.append(f"{name}: it has privileges, or a root that can be written to")
    if f"keys:{service.get('working_dir')}" not in service.get("volumes", []):
        problems.append(f"{name}: its working directory is not the volume keys")
    if name != "seal-key" and not follows(name, "seal-key"):
        problems.append(f"{name} does not start after seal-key")
    if service["environment"].get("GRAB_SEAL_KEYS", "") is not None:
        problems.append(f"{name}: GRAB_SEAL_KEYS must be passed on unchanged, and left out if it is not set")
    if (
        f"install -d -m 700 -o 1000 -g 1000 {service.get('working_dir')}"
        not in Path("Dockerfile").read_text()
    ):
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
        broker_environment = services[name]["environment"]
        voter = f"{broker_environment['KAFKA_NODE_ID']}@{name}:9093"
        if (
            voter not in broker_environment["KAFKA_CONTROLLER_QUORUM_VOTERS"]
            or f"{name}:29092" not in environment["GRAB_KAFKA"]
        ):
            problems.append(f"{name} is not a voter, or not in GRAB_KAFKA")
cluster_address(environment["GRAB_REDIS_URL"])
# The secured servers: each gets the files that the service certificates makes, and no other; no client is
# trusted without a password; what reaches them has settings that fit together.
with tempfile.TemporaryDirectory() as folder:
    made = set(write(Path(folder), Places()))
    named_by_redis = re.findall(r"/tls/([\w.-]+)", (Path(folder) / "redis.conf").read_text())
for name in SECURED:
    if name not in services:
        problems.append(f"service {name} is missing")
        continue
    service = services[name]
    if service.get("profiles") != ["secure"]:
        problems.append(f"{name} is not in the profile secure")
    if name != "certificates" and not follows(name, "certificates"):
        problems.append(f"{name} does not start after certificates")
    used = re.findall(r"/(?:certificates|tls)/([\w.-]+)", str(service))
    # Copied from the folder of all files to that of the server.
    copied = re.search(r"install -o \w+ -m 600 (.*?) /tls\)", " ".join(service["command"]))
    used += copied[1].split() if copied else []
    problems += [
        f"{name}: certificates does not make {file}" for file in sorted(set(used)) if file not in made
    ]
    server_files = re.findall(r"/tls/([\w.-]+)", str(service)) + named_by_redis * (name == "redis-secure")
    problems += [
        f"{name}: {file} is not copied to /tls"
        for file in sorted(set(server_files) - set(copied[1].split() if copied else ()))
    ]
    for volume in service["volumes"]:
        if volume.split(":")[0] not in compose["volumes"]:
            problems.append(f"{name}: volume {volume} is not declared")
        if volume.startswith("certificates:") and name != "certificates" and not volume.endswith(":ro"):
            problems.append(f"{name} can write to the certificates")
    if "trust" in str(service.get("environment", {}).get("POSTGRES_HOST_AUTH_METHOD", "")):
        problems.append(f"{name} trusts everybody")
    plain = services.get(name.removesuffix("-secure"), service)
    if service["image"] != plain["image"]:
        problems.append(f"{name} has the image {service['image']}, and not {plain['image']}")
secured = services["worker-secure"]["environment"]
unknown = {name.removesuffix("_FILE").removeprefix("GRAB_").lower() for name in secured} - set(
    Settings.model_fields
)
problems += [f"worker-secure: GRAB_{name.upper()} is not a setting" for name in sorted(unknown)]
if secured["GRAB_KAFKA"] != f"{Places().kafka.host}:{Places().kafka.port}":
    problems.append("worker-secure: GRAB_KAFKA is not where kafka-secure listens")
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
# The image has what the tests have run with.
locked = set(Path("requirements.lock").read_text().replace("\\\n", "").split("\n"))
for lock in ("requirements-runtime.lock", "requirements-archives.lock", "requirements-build.lock"):
    pins = [line for line in Path(lock).read_text().replace("\\\n", "").split("\n") if "==" in line]
    problems += [
        f"{lock}: {pin.split()[0]} is not as in requirements.lock: run `make lock-image`"
        for pin in pins
        if not pin.startswith("#") and pin not in locked
    ]
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
for lock, extras in (
    ("requirements-runtime.lock", ["server"]),
    ("requirements-archives.lock", ["server", "analysts", "s3"]),
):
    text = Path(lock).read_text()
    needed = [one for extra in extras for one in project["optional-dependencies"][extra]]
    for requirement in (*project["dependencies"], *needed):
        named = re.split(r"[\[=<>~]", requirement)[0].lower()
        if f"\n{named}==" not in f"\n{text}":
            problems.append(f"{lock} lacks {named}: run `make lock-image`")
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
