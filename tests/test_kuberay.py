"""The Kubernetes manifest against KubeRay's own schema, where that is at hand."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from rayhs.config import RunConfig, parse_config
from rayhs.versions import RAY_RANGE

ROOT = Path(__file__).parent.parent
MANIFEST = ROOT / "clusters" / "kuberay" / "rayjob.yaml"
CRDS = Path(os.environ.get("RAYHS_KUBERAY_CRDS") or ROOT.parent / "shared" / "kuberay-crds")


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    path = CRDS / "rayjobs.yaml"
    if not path.is_file():
        pytest.skip(f"{path} is not there; set RAYHS_KUBERAY_CRDS to a folder with KubeRay's rayjobs.yaml")
    versions = yaml.safe_load(path.read_text())["spec"]["versions"]
    schema = next(v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1")
    closed = close(schema)
    del closed["properties"]["metadata"]["additionalProperties"]  # the API server's own, not in the schema
    return Draft202012Validator(closed)


def close(schema: Any) -> Any:
    """The JSON schema of an OpenAPI one, refusing unknown properties as ``kubectl --validate=strict`` does."""
    if isinstance(schema, list):
        return [close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close(value) for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    preserved = schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and "additionalProperties" not in schema and not preserved:
        closed["additionalProperties"] = False
    return closed


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    config_map, job = yaml.safe_load_all(MANIFEST.read_text())
    assert (config_map["kind"], job["kind"]) == ("ConfigMap", "RayJob")
    return config_map, job


def containers(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        yield from group["template"]["spec"]["containers"]


def test_manifest_fits_the_schema(validator: Draft202012Validator) -> None:
    _, job = documents()
    assert [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in validator.iter_errors(job)] == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "entryPoint"), "rayhs extract"),
        (("spec", "backoffLimit"), "one"),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "password"),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "maxReplica"), 8),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "volumesMounts"), []),
    ],
)
def test_schema_finds_mistakes(validator: Draft202012Validator, path: tuple[Any, ...], value: object) -> None:
    job = copy.deepcopy(documents()[1])
    node: Any = job
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    assert len(list(validator.iter_errors(job))) == 1


def test_what_the_schema_does_not_say() -> None:
    _, job = documents()
    spec = job["spec"]
    assert spec["submissionMode"] in {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"}
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    version = tuple(int(part) for part in spec["rayClusterSpec"]["rayVersion"].split(".")[:2])
    assert RAY_RANGE[0] <= version <= RAY_RANGE[1]
    dockerfile = (MANIFEST.parent / "Dockerfile").read_text()
    assert f"rayproject/ray:{spec['rayClusterSpec']['rayVersion']}-" in dockerfile
    images = {container["image"] for container in containers(job)}
    assert len(images) == 1
    assert images.pop() in dockerfile


def test_run_file_is_valid_and_where_the_entrypoint_reads_it() -> None:
    config_map, job = documents()
    config = parse_config(yaml.safe_load(config_map["data"]["run.yaml"]))
    assert isinstance(config, RunConfig)
    head = next(containers(job))
    mount = next(m["mountPath"] for m in head["volumeMounts"] if m["name"] == "run")
    assert job["spec"]["entrypoint"] == f"rayhs extract {mount}/run.yaml"
    volume = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"][0]
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    gpu = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert config.cluster.replica_range == (gpu["minReplicas"], gpu["maxReplicas"])
