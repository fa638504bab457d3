"""deploy/kubernetes: rendered by kubectl where it is installed, and what its parts say about each other."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.configs.options import all_options
from quire.server.routes import ROUTES

BASE = Path(__file__).parents[2] / "deploy/kubernetes"
KUBECTL = shutil.which("kubectl")
LABEL = {"app.kubernetes.io/name": "quire"}


def parts() -> dict[str, Any]:
    """By kind, as they are written."""
    base = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    found = [yaml.safe_load((BASE / name).read_text()) for name in base["resources"]]
    assert {path.name for path in BASE.glob("*.yaml")} == {"kustomization.yaml", *base["resources"]}
    return {one["kind"]: one for one in found} | {"Kustomization": base}


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
def test_it_can_be_rendered():
    done = subprocess.run([KUBECTL, "kustomize", str(BASE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}
    pod = found["Deployment"]["spec"]["template"]
    assert LABEL.items() <= pod["metadata"]["labels"].items()
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert found[kind]["spec"]["selector"]["matchLabels"] == LABEL, kind
    assert found["Service"]["spec"]["selector"] == LABEL
    (source,) = pod["spec"]["containers"][0]["envFrom"]
    assert source["configMapRef"]["name"] == found["ConfigMap"]["metadata"]["name"]


def test_settings_are_flags_and_their_paths_are_mounted():
    (generated,) = parts()["Kustomization"]["configMapGenerator"]
    settings = dict(one.split("=", 1) for one in generated["literals"])
    assert {name.removeprefix("QUIRE_").lower() for name in settings} <= set(all_options())
    (container,) = parts()["Deployment"]["spec"]["template"]["spec"]["containers"]
    mounts = [one["mountPath"] for one in container["volumeMounts"]]
    paths = [value for name, value in settings.items() if name.endswith("_FILE")]
    assert paths and all(any(path.startswith(f"{mount}/") for mount in mounts) for path in paths)
    volumes = {one["name"] for one in parts()["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    assert volumes == {one["name"] for one in container["volumeMounts"]}


def test_a_pod_has_time_to_finish_and_no_links_to_services():
    spec = parts()["Deployment"]["spec"]["template"]["spec"]
    (generated,) = parts()["Kustomization"]["configMapGenerator"]
    settings = dict(one.split("=", 1) for one in generated["literals"])
    pause = float(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > pause + float(settings["QUIRE_SHUTDOWN_TIMEOUT"])
    assert spec["enableServiceLinks"] is False  # QUIRE_PORT=tcp://... would be no port


def test_probes_and_the_autoscaler_ask_for_what_there_is():
    (container,) = parts()["Deployment"]["spec"]["template"]["spec"]["containers"]
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"/ready", "/live"} <= {route.path for route in ROUTES}
    (metric,) = parts()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "quire_num_requests_waiting"
    assert parts()["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["kind"] == "Deployment"
    assert "replicas" not in parts()["Deployment"]["spec"]  # applying it again would undo the autoscaler's number
