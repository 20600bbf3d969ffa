"""Checks compose.yaml and the Dockerfile without an engine: their structure, and that what they name is there."""

import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from ops.services.servers import kafka_version

compose = yaml.safe_load(Path("compose.yaml").read_text())
services = compose["services"]
problems = []
for name in ("redis", "kafka", "postgres", "init", "decide", "project"):
    if name not in services:
        problems.append(f"service {name} is missing")
for name, service in services.items():
    image = service.get("image", "")
    if ":" not in image or image.endswith(":latest"):
        problems.append(f"{name}: image {image!r} names no version")
    if name not in ("init",) and "healthcheck" not in service:
        problems.append(f"{name}: no healthcheck")
    for other in service.get("depends_on", {}):
        if other not in services:
            problems.append(f"{name} depends on {other}, which is not there")
    for port in service.get("ports", []):
        if not str(port).startswith("127.0.0.1:"):
            problems.append(f"{name}: port {port} is open to everyone")
if not kafka_version()[0].isdigit():
    problems.append(f"Kafka's version cannot be read from its image: {kafka_version()!r}")
dockerfile = Path("Dockerfile").read_text()
for line in dockerfile.splitlines():
    words = line.split()
    if words and words[0] == "COPY" and "--from" not in line:
        problems += [f"Dockerfile copies {path}, which is not there" for path in words[1:-1] if not Path(path).exists()]
if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
    done = subprocess.run(
        ["docker", "compose", "config", "--quiet"],
        capture_output=True,
        text=True,
        env={"GRAB_SEAL_KEYS": "k:x", "PATH": "/usr/bin:/bin"},
    )
    if done.returncode != 0:
        problems.append(f"docker compose config: {done.stderr.strip()}")
for problem in problems:
    sys.stdout.write(f"compose.yaml: {problem}\n")
sys.stdout.write("" if problems else f"compose.yaml: {len(services)} services\n")
sys.exit(bool(problems))
