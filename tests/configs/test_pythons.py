"""The server answers under each version of Python that it supports, as far as it is installed with quire's packages."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers.server.process import answers, serving

ROOT = Path(__file__).parents[2]
VERSIONS = ["3.11", "3.12", "3.13", "3.14"]
_PACKAGES = ("torch", "transformers", "fastapi", "zmq", "llguidance")
_STATE = (
    "import sys, importlib.util as util; "
    f"print('{{}}.{{}}'.format(*sys.version_info), all(util.find_spec(name) for name in {_PACKAGES}))"
)


@functools.cache
def interpreters() -> dict[str, str]:
    """Paths of interpreters that have the packages, by version: of $PYTHONS (separated by colons), or on the path."""
    named = os.environ.get("PYTHONS", "").split(os.pathsep)
    found = [*filter(None, named), sys.executable, *filter(None, map(shutil.which, (f"python{v}" for v in VERSIONS)))]
    usable: dict[str, str] = {}
    for path in found:
        done = subprocess.run([path, "-c", _STATE], capture_output=True, text=True, timeout=60)
        version, _, has_packages = done.stdout.strip().partition(" ")
        if has_packages == "True":
            usable.setdefault(version, path)
    return usable


def test_the_versions_are_those_of_the_package():
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert oldest == f">={VERSIONS[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_answers(tmp_path, version):
    if (python := interpreters().get(version)) is None:
        pytest.skip(f"no Python {version} with quire's packages: $PYTHONS names interpreters, separated by colons")
    if python == sys.executable:
        pytest.skip("all other tests run with it")
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    with serving([python], environment, tmp_path / "log") as client:
        answers(client)
