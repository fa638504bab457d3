"""constraints.txt has a solution for every Python, extra and build of torch. uv resolves it; nothing is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tools import constraints

pytestmark = pytest.mark.slow

UV = [sys.executable, "-m", "uv"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = constraints.extras()


@pytest.fixture(scope="module", autouse=True)
def _reachable_index(tmp_path_factory):
    """Skips the tests if no index answers for a package that has one wheel and no dependencies."""
    small = tmp_path_factory.mktemp("index") / "requirements.in"
    small.write_text("iniconfig")
    try:
        constraints.resolve(UV, requirements=small)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no package index is reachable: {error.stderr.strip()[-200:]}")


@pytest.fixture(scope="module")
def cpu_build(tmp_path_factory) -> Path:
    """A folder with wheels named like PyTorch's CPU builds: a local version, and no triton among the requirements."""
    folder = tmp_path_factory.mktemp("wheels")
    version = f"{pinned_version('torch')}+cpu"
    requires = ("filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5")
    metadata = [f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\nRequires-Python: >=3.10"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"torch-{version}.dist-info/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"torch-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"torch-{version}.dist-info/RECORD", "")
    return folder


def pinned_version(name: str) -> str:
    return re.search(rf"^{name}==(\S+)", constraints.FILE.read_text(encoding="utf-8"), re.MULTILINE)[1]


def pins(python: str, output: Path, *options: str) -> dict[str, str]:
    """Version by package, each with a wheel for Linux on x86-64."""
    options += ("--python-version", python, "--python-platform", "x86_64-manylinux_2_31", "--only-binary", ":all:")
    options += ("--constraints", str(constraints.FILE), "--output-file", str(output))
    try:
        constraints.resolve(UV, *options, *(f"--extra={extra}" for extra in EXTRAS))
    except subprocess.CalledProcessError as error:
        pytest.fail(f"Python {python}: {error.stderr}")
    return dict(line.split(" ")[0].split("==") for line in output.read_text(encoding="utf-8").splitlines())


@pytest.fixture(scope="module")
def solutions(cpu_build, tmp_path_factory) -> Iterator[dict[tuple[str, str], Future[dict[str, str]]]]:
    """By Python and build of torch. They wait for the network, so several are resolved at once.

    Pins that meet the requirements of all extras meet those of each extra, and of none.
    """
    folder = tmp_path_factory.mktemp("pins")
    builds = {"index": (), "cpu": ("--find-links", str(cpu_build))}
    with ThreadPoolExecutor(4) as pool:
        yield {
            (python, build): pool.submit(pins, python, folder / f"{python}-{build}.txt", *options)
            for python in PYTHONS
            for build, options in builds.items()
        }


@pytest.mark.parametrize("python", PYTHONS)
def test_the_public_index_alone_has_a_solution(python, solutions):
    found = solutions[python, "index"].result()
    assert found["torch"] == pinned_version("torch") and found["triton"] == pinned_version("triton")


@pytest.mark.parametrize("python", PYTHONS)
def test_a_cpu_build_of_torch_has_a_solution(python, solutions):
    found = solutions[python, "cpu"].result()
    assert found["torch"] == f"{pinned_version('torch')}+cpu" and found["triton"] == pinned_version("triton")
    assert not [name for name in found if name.startswith(("nvidia", "cuda"))]


def test_every_package_that_an_installation_needs_is_pinned(solutions):
    """An installation without a pin changes from day to day."""
    names = {re.split("[=;[ ]", line)[0] for line in constraints.FILE.read_text(encoding="utf-8").splitlines()}
    assert all(solution.result().keys() <= names for solution in solutions.values())
    assert {re.split("[>=<]", package)[0] for package in constraints.packages_without_dependencies()} <= names


def test_make_constraints_writes_pins_that_resolve(tmp_path, monkeypatch):
    """From a file with the pin that once had no solution next to torch's."""
    broken = re.sub(r"^triton==.*$", "triton==3.9.0", constraints.FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    monkeypatch.setattr(constraints, "FILE", tmp_path / "constraints.txt")
    constraints.FILE.write_text(broken)
    with pytest.raises(subprocess.CalledProcessError, match="non-zero"):
        constraints.resolve(UV, "--constraints", str(constraints.FILE), "--output-file", os.devnull)
    constraints.write(UV, [])
    assert pins("3.11", tmp_path / "pins.txt")["triton"] == pinned_version("triton")
