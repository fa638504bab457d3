"""The wheel: which files it has, and that an installed quire works next to a user's modules of any name."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

from quire.worker.cpu import build

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("checkpoints", "cli", "configs", "engine", "quire", "server", "worker")

SCRIPT = """
from quire import LLM, SamplingParams

with LLM(**SETTINGS) as llm:
    outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    print("generated", len(outputs[0].outputs[0].token_ids))
"""


def test_every_folder_of_modules_is_a_package():
    """A folder without `__init__.py` is importable from a checkout and missing from a wheel."""
    modules = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    assert not [str(path) for path in modules if not (path.parent / "__init__.py").exists()]


def run(*command: object, **options) -> str:
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=240, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


# "Compiles" every level by copying this CPU's library: compiling takes minutes.
COMPILER = """#!/bin/sh
while [ $# -gt 0 ]; do
  [ "$1" = -shared ] && shared=1
  [ "$1" = -o ] && out="$2"
  shift
done
if [ -n "$shared" ]; then cp {library} "$out"; else : > "$out"; fi
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory, _kernels_in_the_cache) -> tuple[Path, dict[str, str]]:
    """A copy of the sources (setuptools leaves a `build` folder next to them), and the environment for a build."""
    folder = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, folder / "src" / name, ignore=ignore, symlinks=True)
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, folder / "src")
    variables = dict(os.environ)
    if library := build.find_library(build.cpu_level()):
        (folder / "c++").write_text(COMPILER.format(library=library))
        (folder / "c++").chmod(0o755)
        variables["CXX"] = str(folder / "c++")
    return folder / "src", variables


def make_wheel(source: Path, folder: Path, variables: dict[str, str]) -> Path:
    """Built without a network."""
    pip = (sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", folder, source, env=variables)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return make_wheel(source[0], tmp_path_factory.mktemp("wheel"), source[1])


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory, _kernels_in_the_cache) -> Path:
    """The `bin` folder of a virtual environment with the wheel and this interpreter's packages, but not this checkout.

    A folder that a .pth file names is searched, but its own .pth files, through which the checkout is installed, are
    not read.
    """
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "packages.pth").write_text("".join(f"{folder}\n" for folder in folders))
    return venv / "bin"


@pytest.fixture
def users_folder(tmp_path) -> Path:
    """A folder with modules that are named like our folders; importing one exits."""
    for module in ("server.py", "engine.py", "cli.py", "configs/__init__.py", "worker/__init__.py"):
        (tmp_path / module).parent.mkdir(exist_ok=True)
        (tmp_path / module).write_text("raise SystemExit('a module of the user was imported')\n")
    return tmp_path


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "QUIRE_"))}


def test_the_wheel_has_one_top_level_package_and_every_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"quire"}
    for name in FOLDERS:
        for path in (ROOT / name).rglob("*"):
            if path.suffix not in (".pyc", ".so") and path.is_file():  # rglob follows no links
                inside = path.relative_to(ROOT).as_posix().removeprefix("quire/")
                assert f"quire/{inside}" in names


def test_the_source_distribution_makes_the_same_wheel(source, wheel, tmp_path):
    """It has the folders inside `quire`, where a checkout has links to them."""
    code = f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", code, cwd=source[0])
    (archive,) = tmp_path.glob("*.tar.gz")
    again = make_wheel(archive, tmp_path, source[1])
    assert again.name == wheel.name
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_an_editable_installation_has_byte_code(source, tmp_path):
    folder, variables = source
    code = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path, cwd=folder, env=variables | {"PYTHONDONTWRITEBYTECODE": "1"})
    for name in ("quire/__init__.py", "engine/core.py", "server/api/openai/routes.py"):
        compiled = Path(importlib.util.cache_from_source(str(folder / name)))
        assert str(folder / name).encode() in compiled.read_bytes()


def test_the_command_works_next_to_modules_of_the_user(installed, users_folder):
    where = run(installed / "python", "-c", "import quire; print(quire.__file__)", cwd="/", env=environment())
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert "serve a model" in run(installed / "quire", "--help", cwd=users_folder, env=environment())
    assert "serve a model" in run(installed / "python", "-m", "quire", "--help", cwd=users_folder, env=environment())


@pytest.mark.skipif(build.cpu_level() is None or build.compiler() is None, reason="no native kernels here")
def test_the_wheel_has_the_kernels_of_every_level_and_says_on_which_systems_they_run(wheel):
    assert wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if "/prebuilt/" in name]
    assert sorted(name.split("-")[2] for name in names) == sorted(build.levels_of("x86_64"))


@pytest.mark.parametrize("settings", [{}, {"pipeline_parallel_size": 2}], ids=["one rank", "two ranks"])
def test_a_script_works_next_to_modules_of_the_user(installed, users_folder, settings):
    settings |= {"device": "cpu", "max_model_len": 64, "kv_cache_memory_bytes": 2**24}
    (users_folder / "script.py").write_text(SCRIPT.replace("SETTINGS", repr(settings)))
    assert "generated 4" in run(installed / "python", "script.py", cwd=users_folder, env=environment())


@pytest.mark.parametrize("frontends", [1, 2])
def test_a_server_works_next_to_modules_of_the_user(installed, users_folder, frontends):
    """Ready by the probe of the container's health check, which runs a file of the installed package by itself.

    Native from the first request, without a compiler and with an empty cache.
    """
    variables = environment() | {"QUIRE_ADDRESS_FILE": str(users_folder / "address"), "QUIRE_DEVICE": "cpu"}
    variables |= {"PATH": str(installed), "QUIRE_CACHE": str(users_folder / "cache")}
    variables.pop("CXX", None)
    flags = ("--port", "0", "--max-model-len", "64", "--kv-cache-memory-bytes", str(2**24))
    (probe,) = installed.parent.glob("lib/python3.*/site-packages/quire/cli/health.py")
    with open(users_folder / "log", "w+") as log:
        server = subprocess.Popen(
            [installed / "quire", "serve", *flags, "--api-server-count", str(frontends)],
            cwd=users_folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 120
            ask = [installed / "python", "-I", "-S", probe]
            while subprocess.run(ask, env=variables, cwd=users_folder, capture_output=True, check=False).returncode:
                assert server.poll() is None and time.monotonic() < deadline, (users_folder / "log").read_text()
                time.sleep(0.2)
            started = time.time()
            request = urllib.request.Request(
                f"http://{(users_folder / 'address').read_text()}/v1/completions",
                json.dumps({"prompt": "The capital of France is", "max_tokens": 4}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 4
            with urllib.request.urlopen(f"http://{(users_folder / 'address').read_text()}/server_info") as response:
                kernels = json.load(response)["kernels"]
            if build.cpu_level() and build.compiler():
                assert kernels["name"] == "native" and kernels["since"] < started
        finally:
            server.terminate()
            assert server.wait(timeout=60) == 0, (users_folder / "log").read_text()
