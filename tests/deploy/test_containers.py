"""Checks of Dockerfile and compose.yaml that do not build an image."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from quire.configs.options import all_options
from quire.worker.cpu import build

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
INSTRUCTION = re.compile(
    r"(FROM|RUN|COPY|ENV|ARG|LABEL|USER|HEALTHCHECK|ENTRYPOINT|VOLUME|EXPOSE|WORKDIR)\s+(.*)", re.DOTALL
)


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, continuation lines joined as Docker does."""
    result: dict[str, list[tuple[str, str]]] = {}
    text = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if not line.strip():
            continue
        keyword, rest = INSTRUCTION.fullmatch(line).groups()
        if keyword == "FROM":
            result[rest.split(" AS ")[1]] = instructions = []
        elif result:
            instructions.append((keyword, rest))
    return result


STAGES = stages()


def position(stage: str, keyword: str, part: str) -> int:
    (found,) = [i for i, (key, rest) in enumerate(STAGES[stage]) if key == keyword and part in rest]
    return found


@pytest.mark.parametrize("stage", ["build-cpu", "build-cuda"])
def test_an_edit_of_the_sources_installs_no_package_again(stage):
    sources = position(stage, "COPY", ". .")
    assert position(stage, "RUN", "-r requirements.txt") < sources < position(stage, "RUN", "--no-deps .")
    assert all("--mount=type=cache" in rest for key, rest in STAGES[stage] if "pip install" in rest)
    assert not [rest for key, rest in STAGES["build"] if key == "COPY" and rest != "pyproject.toml constraints.txt ./"]


def test_the_requirements_are_those_of_the_project(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = re.search(
        r"python -c .* > requirements.txt", STAGES["build"][position("build", "RUN", "requirements.txt")][1]
    )[0]
    subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        check=True,
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["files"]]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == wanted


def test_the_kernels_are_built_from_what_their_stage_copies(tmp_path):
    """A library is located by the hash of its sources."""
    copied = [rest.split() for key, rest in STAGES["kernels"] if key == "COPY"]
    for source, target in copied:
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, tmp_path / ("build.py" if target == "./" else target))
    code = "import build; print(*(build.library_prefix(level) for level in build.LEVELS))"
    names = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert names == [build.library_prefix(level) for level in build.LEVELS]
    installed = position("build-cpu", "RUN", "--no-deps .")
    assert position("build-cpu", "COPY", "/kernels/prebuilt ./worker/cpu/prebuilt") < installed
    assert build.prebuilt_folder() == ROOT / "worker" / "cpu" / "prebuilt"


@pytest.mark.parametrize(
    ("machine", "target", "package", "compiler"),
    [
        ("", "", "g++", "g++"),  # an older builder names neither
        ("arm64", "arm64", "g++", "g++"),
        ("amd64", "arm64", "g++-aarch64-linux-gnu", "aarch64-linux-gnu-g++"),
        ("arm64", "amd64", "g++-x86-64-linux-gnu", "x86_64-linux-gnu-g++"),
        ("amd64", "riscv64", None, None),
    ],
)
def test_the_kernels_are_compiled_for_the_images_machine(tmp_path, machine, target, package, compiler):
    (tmp_path / "apt-get").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "rm").write_text("#!/bin/sh\n")
    (tmp_path / "python").write_text('#!/bin/sh\necho "$CXX"\n')
    for name in ("apt-get", "rm", "python"):
        (tmp_path / name).chmod(0o755)
    script = "\n".join(["set -eu", *(rest for key, rest in STAGES["kernels"] if key == "RUN")])
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BUILDARCH": machine, "TARGETARCH": target}
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (package is not None)
    if package is not None:
        assert done.stdout.split()[-2:] == [package, compiler]


@pytest.mark.parametrize(
    "cuda, variables, expected",
    [
        (None, {"PIP_EXTRA_INDEX_URL": "https://example.org"}, ""),
        ("13.0", {"PIP_EXTRA_INDEX_URL": "https://example.org"}, "torch 2.13.0 is a CUDA build"),
        ("13.0", {"TORCH_BUILD": "any"}, ""),
        ("13.0", {}, "set --build-arg PIP_EXTRA_INDEX_URL=INDEX"),  # fails before any download
    ],
)
def test_the_cpu_image_never_holds_cuda_by_accident(tmp_path, cuda, variables, expected):
    script = STAGES["build-cpu"][position("build-cpu", "RUN", "constraints.txt torch")][1].replace(
        "--mount=type=cache,target=/root/.cache/pip", ""
    )
    (tmp_path / "pip").write_text('#!/bin/sh\necho pip "$@"\n')
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "torch.py").write_text(f"__version__ = '2.13.0'\nclass version: cuda = {cuda!r}\n")
    for name in ("pip", "python"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TORCH_BUILD": "cpu", **variables}
    ended = subprocess.run(
        ["sh", "-c", script.replace("/opt/quire/bin", str(tmp_path))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode == 0) == (expected == "") and expected in ended.stderr, ended.stderr
    assert ("pip install" in ended.stdout) == (variables != {})


def test_the_health_check_follows_the_server():
    (check,) = [rest for key, rest in STAGES["base"] if key == "HEALTHCHECK"]
    assert json.loads(check[check.index("[") :]) == ["python", "-I", "-S", "/opt/quire/health.py"]
    assert "--start-interval" not in check  # stops podman 4
    for stage in ("build-cpu", "build-cuda"):
        assert position(stage, "RUN", "site-packages/quire/cli/health.py /opt/quire/health.py")
    assert (ROOT / "cli" / "health.py").is_file()
    environment = dict(
        pair.split("=", 1) for key, rest in STAGES["base"] if key == "ENV" for pair in rest.split() if "=" in pair
    )
    folder = os.path.dirname(environment["QUIRE_ADDRESS_FILE"])
    assert re.search(
        rf"install -d -o quire -g quire .*{folder}\b", STAGES["base"][position("base", "RUN", "useradd")][1]
    )
    for name in environment:  # an unknown variable would end the server
        assert not name.startswith("QUIRE_") or name in {option.variable for option in all_options().values()}


def test_the_container_gets_the_settings_of_one_file():
    """The file is named by a plain text: podman-compose stops at a mapping."""
    for service in COMPOSE["services"].values():
        assert service["env_file"] == "${ENV_FILE:-deploy/quire.env}"
        assert service["environment"] == {"QUIRE_HOST": "0.0.0.0", "QUIRE_PORT": "8000"}
        assert service["init"] is True and service["ports"] == ["127.0.0.1:${PORT:-8000}:8000"]
        assert float(service["stop_grace_period"].removesuffix("s")) > all_options()["shutdown_timeout"].default


def test_the_file_of_settings_names_every_everyday_variable():
    lines = (ROOT / "deploy" / "quire.env").read_text(encoding="utf-8").splitlines()
    assert all(not line or line.startswith("#") for line in lines)  # it changes nothing until it is edited
    named = dict(line[1:].split("=", 1) for line in lines if line.startswith("#QUIRE_"))
    known = {option.variable: option for option in all_options().values()}
    assert set(named) <= set(known)
    assert {name for name, option in known.items() if option.everyday} - {"QUIRE_DEVICE"} <= set(named)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("QUIRE_TEST_CONTAINERS"), reason="builds an image for some 10 minutes: set QUIRE_TEST_CONTAINERS"
)
@pytest.mark.skipif(not (shutil.which("podman") or shutil.which("docker")), reason="needs podman or docker")
def test_the_image_is_built_and_run():
    """TORCH_WHEEL and PIP_CERT as tools/containers.sh says."""
    done = subprocess.run([ROOT / "tools" / "containers.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("\nhealthy\n"), done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_the_systemd_unit_is_valid_and_hardened(tmp_path):
    unit = tmp_path / "quire.service"
    text = (ROOT / "deploy" / "quire.service").read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/quire/bin/quire", sys.executable))
    verified = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert verified.returncode == 0 and "quire.service" not in verified.stderr, verified.stderr
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert float(re.search(r"Overall exposure level for \S+ ([\d.]+)", rated.stdout + rated.stderr)[1]) < 3
    timeout = float(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1])
    assert timeout > all_options()["shutdown_timeout"].default


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_the_systemd_socket_is_valid(tmp_path):
    for name in ("quire.service", "quire.socket"):
        text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("/opt/quire/bin/quire", sys.executable))
    units = [str(tmp_path / name) for name in ("quire.service", "quire.socket")]
    verified = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert verified.returncode == 0 and "quire." not in verified.stderr, verified.stderr


def test_compose_builds_stages_that_exist():
    arguments = {rest.split("=")[0] for instructions in STAGES.values() for key, rest in instructions if key == "ARG"}
    for service in COMPOSE["services"].values():
        assert service["build"]["target"] in STAGES and set(service["build"].get("args", {})) <= arguments
