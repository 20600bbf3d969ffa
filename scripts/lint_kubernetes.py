"""Checks deploy/kubernetes without a cluster: the schemas of the oldest and the newest supported Kubernetes,
and that the manifests name settings, ports and files that exist and take no privilege.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from kubernetes_validate import SchemaNotFoundError, ValidationError, validate

from grabstream.settings import FROM_FILES, GATEWAY_PORT, Settings, host_and_port

FOLDER: Final = Path("deploy/kubernetes")
VERSIONS: Final = ("1.31", "1.37")
VERSION: Final = tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
DEPLOYING: Final = Path("docs/deploying.md").read_text()
#: The user of the image.
USER: Final = re.findall(r"^USER (\d+):(\d+)$", Path("Dockerfile").read_text(), re.MULTILINE)


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (file, object) for each object of the manifests."""
    for name in kustomization["resources"]:
        for manifest in yaml.safe_load_all((FOLDER / name).read_text()):
            yield name, manifest


def schema_problems(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What the schemas of Kubernetes say against an object."""
    for version in VERSIONS:
        try:
            validate(dict(manifest), version, strict=True)
        except SchemaNotFoundError as error:
            yield f"Kubernetes {version} has no schema: {error}"
        except ValidationError as error:
            yield f"Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message}"


def settings_problems(data: Mapping[str, str]) -> Iterator[str]:
    """The errors in the settings of the ConfigMap."""
    for name, value in data.items():
        field = name.removeprefix("GRAB_").lower()
        if field.endswith("_file"):
            file = value.removeprefix("/secrets/")
            if field.removesuffix("_file") not in FROM_FILES:
                yield f"{name}: no setting that is read from a file"
            if f"--from-file={file}" not in DEPLOYING:
                yield f"{name}: docs/deploying.md does not say how {file} gets into the Secret"
        elif field not in Settings.model_fields and f"{field}_" not in Settings.model_fields:
            yield f"{name}: no setting"


def pod_problems(pod: Mapping[str, Any]) -> Iterator[str]:
    """The errors of a pod: privileges, files it cannot read, ports that it does not serve."""
    security = pod["securityContext"]
    if [(str(security["runAsUser"]), str(security["runAsGroup"]))] != USER or not security["runAsNonRoot"]:
        yield "it does not run as the user of the Dockerfile"
    if security["fsGroup"] != security["runAsGroup"]:
        yield "its user cannot read the files of the Secret"
    if pod["enableServiceLinks"] or pod["automountServiceAccountToken"]:
        yield "it gets environment variables or a token that it does not need"
    for container in pod["containers"]:
        own = container["securityContext"]
        if own["allowPrivilegeEscalation"] or own["capabilities"] != {"drop": ["ALL"]}:
            yield "its container has privileges"
        mounted = [one["name"] for one in container["volumeMounts"]]
        if not own["readOnlyRootFilesystem"] or "temporary" not in mounted:
            yield "its root can be written to, or it has no /tmp"
        if container["image"] != f"grabstream:{VERSION}":
            yield f"its image is not grabstream:{VERSION}"
        if "memory" not in container["resources"]["limits"]:
            yield "its memory has no limit"
        for port in container.get("ports", ()):
            if port["containerPort"] != {"metrics": METRICS_PORT, "http": GATEWAY_PORT}[port["name"]]:
                yield f"nothing listens on its port {port['name']}"


kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
problems = [
    f"kustomization.yaml does not name {path.name}"
    for path in FOLDER.glob("*.yaml")
    if path.name not in (*kustomization["resources"], "kustomization.yaml")
]
if [one["newTag"] for one in kustomization["images"]] != [VERSION]:
    problems.append(f"kustomization.yaml: the tag of the image is not {VERSION}")
manifests = list(objects())
[settings] = [manifest["data"] for _, manifest in manifests if manifest["kind"] == "ConfigMap"]
METRICS_PORT: Final = host_and_port(settings["GRAB_METRICS_LISTEN"])[1]
for file, manifest in manifests:
    named = f"{file}: {manifest['kind']} {manifest['metadata']['name']}"
    said = list(schema_problems(manifest))
    if manifest["kind"] == "ConfigMap":
        said += settings_problems(manifest["data"])
    if "template" in manifest.get("spec", {}):
        said += pod_problems(manifest["spec"]["template"]["spec"])
    problems += [f"{named}: {problem}" for problem in said]
for problem in problems:
    sys.stdout.write(f"deploy/kubernetes/{problem}\n")
sys.stdout.write("" if problems else f"deploy/kubernetes: {len(manifests)} objects\n")
sys.exit(bool(problems))
