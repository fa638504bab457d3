"""Manifests of deploy/kubernetes against the schemas of Kubernetes, the fields of other resources, and quire itself.

FLEET_PYTHON names the Python of an environment with kubernetes-validate, which has Kubernetes' schemas; without it and
without it in this one they are not checked.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.server.routes import ROUTES
from tests.configs.test_peer_flags import start  # noqa: F401
from tests.deploy.test_kubernetes import BASE, LABEL, parts
from tests.deploy.test_routers import PYTHON, needs

FIELDS = yaml.safe_load((Path(__file__).parent / "resources.yaml").read_text())
OPTIONS = {
    one["kind"]: one for path in (BASE / "options").glob("*.yaml") for one in yaml.safe_load_all(path.read_text())
}
VALIDATE = """
import json, sys, kubernetes_validate
for one in json.load(sys.stdin):
    try:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
    except Exception as error:
        sys.exit(f"{one['kind']}: {error}")
"""


def labelled(one: dict[str, Any]) -> dict[str, Any]:
    """As Kustomize renders it: the labels of the base, also in selectors and templates."""
    one = copy.deepcopy(one)
    spec = one.get("spec", {})
    if one["kind"] in ("Deployment", "PodDisruptionBudget"):
        spec["selector"] = {"matchLabels": LABEL}
    if one["kind"] == "Deployment":
        spec["template"]["metadata"]["labels"] = LABEL
    if one["kind"] == "Service":
        spec["selector"] = LABEL
    return one


def pods() -> dict[str, dict[str, Any]]:
    """The templates of pods, by name."""
    group = OPTIONS["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    names = {"leader": "leaderTemplate", "worker": "workerTemplate"}
    return {name: group[key] for name, key in names.items()} | {"deployment": parts()["Deployment"]["spec"]["template"]}


def documents() -> Iterator[dict[str, Any]]:
    """What Kubernetes' own schemas describe."""
    yield from (labelled(one) for kind, one in parts().items() if kind != "Kustomization")
    yield OPTIONS["Service"]
    for name, pod in pods().items():
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name} | pod["metadata"], "spec": pod["spec"]}
    scaler = copy.deepcopy(parts()["HorizontalPodAutoscaler"])  # with the part that KEDA passes on
    scaler["spec"] |= OPTIONS["ScaledObject"]["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    yield scaler


def validate(found: list[dict[str, Any]]) -> str:
    done = subprocess.run(
        [PYTHON, "-c", VALIDATE], input=json.dumps(found), capture_output=True, text=True, timeout=120
    )
    return done.stderr


def test_kubernetes_has_these_fields():
    needs("kubernetes_validate")
    found = list(documents())
    assert validate(found) == ""
    for one in found:
        wrong = copy.deepcopy(one)
        wrong["spec"]["of"] = "no such field"
        assert "of" in validate([wrong])


def problems(value: Any, field: Any, place: str = "spec") -> Iterator[str]:
    """Compare a value with a field of FIELDS."""
    if isinstance(field, dict) and isinstance(value, dict):
        known = {name.rstrip("!"): inner for name, inner in field.items()}
        for name in field:
            if name.endswith("!") and name[:-1] not in value:
                yield f"{place}.{name[:-1]} is missing"
        for name, one in value.items():
            if (inner := known.get(name, known.get("*"))) is None:
                yield f"{place}.{name} is unknown"
            else:
                yield from problems(one, inner, f"{place}.{name}")
    elif isinstance(field, list) and isinstance(value, list) and value:
        for i, one in enumerate(value):
            yield from problems(one, field[0], f"{place}[{i}]")
    elif isinstance(field, (dict, list)) or not fits(value, field):
        yield f"{place} is {value!r}, not {field}"


def fits(value: Any, field: str) -> bool:
    if limits := re.fullmatch(r"(\d*)\.\.(\d*)", field):
        low, high = (float(one or default) for one, default in zip(limits.groups(), ("-inf", "inf"), strict=True))
        return type(value) is int and low <= value <= high
    types = {"string": str, "integer": int, "boolean": bool, "object": dict, "any": (int, str)}
    return isinstance(value, types[field]) if field in types else value in field.split("|")


@pytest.mark.parametrize("name", FIELDS)
def test_other_resources_have_these_fields(name):
    version, kind = name.split()
    assert OPTIONS[kind]["apiVersion"] == version
    assert list(problems(OPTIONS[kind]["spec"], FIELDS[name])) == []


def test_a_wrong_field_is_found():
    name = "inference.networking.k8s.io/v1 InferencePool"
    wrong = {"targetPorts": [{"number": 0}], "appProtocol": "h2", "selektor": {}}
    assert list(problems(wrong, FIELDS[name])) == [
        "spec.selector is missing",
        "spec.targetPorts[0].number is 0, not 1..65535",
        "spec.appProtocol is 'h2', not http|kubernetes.io/h2c",
        "spec.selektor is unknown",
    ]


def arguments(pod: str, index: int) -> list[str]:
    (container,) = pods()[pod]["spec"]["containers"]
    size = OPTIONS["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"]
    values = {"LWS_GROUP_SIZE": size, "LWS_WORKER_INDEX": index, "LWS_LEADER_ADDRESS": "quire-large-0.quire-large.a"}
    return [re.sub(r"\$\((\w+)\)", lambda found: str(values[found[1]]), one) for one in container["args"]]


def test_a_group_of_pods_starts_quire(start):  # noqa: F811
    found = [start(*arguments(pod, i)) for i, pod in enumerate(("leader", "worker"))]
    assert all(not isinstance(one, str) and one[1] == [] for one in found), found
    (first, second) = (config for config, _ in found)
    for i, config in enumerate((first, second)):
        config.parallel.check_nodes(config.server.headless)
        assert config.parallel.node_rank == i and config.server.headless == bool(i)
    gpus = pods()["leader"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert first.parallel.ranks_per_node == second.parallel.ranks_per_node == int(gpus)
    assert first.parallel.master_addr == second.parallel.master_addr
    (container,) = pods()["leader"]["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"http": first.server.port, "ranks": first.parallel.master_port}
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"/ready", "/live"} <= {route.path for route in ROUTES}
    assert not [name for name in pods()["worker"]["spec"]["containers"][0] if "Probe" in name]


def test_the_pods_of_a_group_have_time_to_finish(start):  # noqa: F811
    ends = {}
    for i, name in enumerate(("leader", "worker")):
        config, _ = start(*arguments(name, i))
        pod = pods()[name]["spec"]
        pause = float(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
        ends[name] = pause + config.server.shutdown_timeout
        assert pod["terminationGracePeriodSeconds"] > ends[name]
    assert ends["worker"] > ends["leader"]  # the ranks of the worker are needed until the leader has answered


def test_pools_and_services_choose_the_pods():
    pool = OPTIONS["InferencePool"]["spec"]
    assert pool["selector"]["matchLabels"] == LABEL
    (container,) = parts()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert pool["targetPorts"] == [{"number": one["containerPort"]} for one in container["ports"]]
    labels = pods()["leader"]["metadata"]["labels"]
    assert OPTIONS["Service"]["spec"]["selector"].items() <= labels.items() != pods()["worker"]["metadata"]["labels"]


def test_scalers_and_pickers_read_what_there_is(server):
    metrics = server.http.get("/metrics").text
    (trigger,) = OPTIONS["ScaledObject"]["spec"]["triggers"]
    asked = re.findall(r"quire:\w+", trigger["metadata"]["query"])
    asked += re.findall(r"vllm:\w+", (BASE / "options/inference-pool.yaml").read_text())
    assert len(asked) == 3
    for name in asked:
        assert re.search(rf"^{name}\{{", metrics, re.MULTILINE), name
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": parts()["Deployment"]["metadata"]["name"]}
    assert OPTIONS["ScaledObject"]["spec"]["scaleTargetRef"] == target
    behavior = OPTIONS["ScaledObject"]["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == parts()["HorizontalPodAutoscaler"]["spec"]["behavior"]
