"""A wheel with the kernels of AArch64, installed in a Debian of that machine under qemu-user, answers a request.

    ARM_ROOT=/var/tmp/arm python -m pytest tests/deploy/test_arm_root.py

As root, with 6 GB, an hour of two cores, mmdebstrap, qemu-user-static (registered with binfmt_misc) and
g++-aarch64-linux-gnu. What $ARM_ROOT has from the last run is used again: the root, its packages, and the wheel if its
kernels are those of these sources.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

from quire.checkpoints import packaged
from quire.worker.cpu import build

SOURCES = Path(__file__).parents[2]
RELEASE, PYTHON, PORT = "bookworm", "3.11", 8397
COMPILER = "aarch64-linux-gnu-g++"
VENV = "opt/quire"
# PyPI's torch for this machine is a CUDA build: importing it needs NVIDIA's libraries
NEEDED = ("torch", "sympy", "networkx", "filelock", "typing-extensions", "setuptools", "transformers", "safetensors")
NEEDED += ("tokenizers", "huggingface-hub", "jinja2", "fastapi", "uvicorn", "pyzmq", "msgspec", "prometheus-client")
NEEDED += ("pyyaml", "numpy", "llguidance")
PLATFORMS = [f"--platform=manylinux{name}_aarch64" for name in ("2014", *(f"_2_{minor}" for minor in range(17, 37)))]


def missing() -> str:
    """Return why the test cannot run, or ""."""
    if "ARM_ROOT" not in os.environ:
        return "takes an hour and 6 GB: ARM_ROOT=/a/folder asks for it"
    lacking = [name for name in ("mmdebstrap", COMPILER) if shutil.which(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed"
    if not Path("/proc/sys/fs/binfmt_misc/qemu-aarch64").exists():
        return "binfmt_misc has no qemu-aarch64 (qemu-user-static registers it)"
    return "" if os.geteuid() == 0 else "not root"


def run(*command: object, **variables: str) -> str:
    done = subprocess.run([str(part) for part in command], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def debian(folder: Path) -> Path:
    """Return a root of AArch64 that has Python and no compiler."""
    root = folder / RELEASE
    if not (root / VENV / "bin/python").exists():
        shutil.rmtree(root, ignore_errors=True)
        packages = "--include=python3,python3-venv,ca-certificates"
        run("mmdebstrap", "--arch=arm64", "--variant=minbase", packages, RELEASE, root)
        run("chroot", root, "python3", "-m", "venv", "--without-pip", f"/{VENV}")
    return root


def install_packages(site: Path) -> None:
    """Unpack what quire needs with this machine's pip, which is not emulated."""
    if (site / "llguidance").exists() and (site / "torch").exists():
        return
    pins = (SOURCES / "constraints.txt").read_text()
    nvidia = re.findall(r"^nvidia-[a-z0-9-]+==[0-9.]+", pins, re.MULTILINE)
    for names, options in ((NEEDED[1:], ("-c", SOURCES / "constraints.txt")), ((NEEDED[0], *nvidia), ("--no-deps",))):
        if "torch" in names:
            names = (re.search(r"^torch==[0-9.]+", pins, re.MULTILINE)[0], *nvidia)
        run(
            *(sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--upgrade", "--target", site, *PLATFORMS),
            *("--platform=any", f"--python-version={PYTHON}", "--only-binary=:all:", *options, *names),
        )


def kernels_of(wheel: Path) -> list[str]:
    """Return the levels whose kernels, of these sources, are in a wheel."""
    files = [Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    levels = build.levels_of("aarch64")
    return [level for level in levels if any(name.startswith(build.library_prefix(level)) for name in files)]


def wheel_in(folder: Path) -> Path:
    """Return a wheel for AArch64 that has the kernels of every level."""
    for wheel in folder.glob("*aarch64.whl"):
        if kernels_of(wheel) == build.levels_of("aarch64"):
            return wheel
        wheel.unlink()
    shutil.rmtree(SOURCES / "build", ignore_errors=True)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, SOURCES, CXX=COMPILER)
    (wheel,) = folder.glob("*aarch64.whl")
    assert kernels_of(wheel) == build.levels_of("aarch64")
    return wheel


def ask(server: subprocess.Popen, log: Path) -> dict:
    """Return the answer to a chat request, when the server is ready."""
    deadline, health = time.monotonic() + 1800, f"http://127.0.0.1:{PORT}/health"
    while True:
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
        try:
            urllib.request.urlopen(health, timeout=60)
            break
        except OSError:
            time.sleep(5)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": "smollm2", "messages": messages, "max_tokens": 16, "temperature": 0})
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/chat/completions", body.encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=1200))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("cpu", [("max", "bf16"), ("cortex-a53", "neon")], ids=lambda cpu: cpu[1])
def test_a_wheel_serves_on_aarch64_with_its_kernels(cpu):
    if reason := missing():
        pytest.skip(reason)
    if packaged.cached("smollm2") is None:
        pytest.skip("SmolLM2 is not in the cache: python tools/fetch_models.py")
    folder = Path(os.environ["ARM_ROOT"]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    root, wheel = debian(folder), wheel_in(folder)
    install_packages(root / VENV / f"lib/python{PYTHON}/site-packages")
    shutil.copy(wheel, root)
    (pip,) = (root / "usr/share/python-wheels").glob("pip-*.whl")
    install = ("/usr/bin/python3", f"/usr/share/python-wheels/{pip.name}/pip", "--python", f"/{VENV}/bin/python")
    run("chroot", root, *install, "install", "-q", "--no-deps", "--no-index", "--force-reinstall", f"/{wheel.name}")
    assert not [name for name in ("c++", "g++", "gcc", "clang++") if (root / "usr/bin" / name).exists()]
    shutil.copy(packaged.cached("smollm2"), root / "smollm2.gguf")
    log, (model, level) = folder / "serve.log", cpu
    options = ("--served-model-name", "smollm2", "--port", PORT, "--max-model-len", 512, "--max-num-seqs", 2)
    # processes of their own, with their /proc, which end with the first
    inside = ("unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={root}/proc", "chroot", root)
    command = [*inside, f"/{VENV}/bin/quire", "serve", "/smollm2.gguf", "--host", "127.0.0.1", *options]
    variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "QEMU_CPU": model}
    with log.open("w") as out:
        server = subprocess.Popen(
            [str(part) for part in command], env=variables, stdout=out, stderr=out, start_new_session=True
        )
    try:
        answer = ask(server, log)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=300)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert f"native kernels ({level})" in log.read_text()
