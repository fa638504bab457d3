"""Writes constraints.txt, the versions that quire is tested with: `python tools/constraints.py [--upgrade]`.

uv resolves quire's dependencies and all extras with the public index alone, for every Python and platform at once, so
that the pins have a solution on a machine with no other source of packages. A pin stays as it is unless a
dependency no longer accepts it or `--upgrade` is given. PyTorch's CPU builds meet the same pins: `torch==2.13.0`
accepts `2.13.0+cpu`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "constraints.txt"
HEADER = """\
# The versions that quire is tested with, for every Python and extra; written by `make constraints`, not by hand.
# torch also accepts its CPU build (2.13.0+cpu), where an index or folder of pip's offers one.
"""
# needs PyTorch to report its dependencies
UNRESOLVABLE_EXTRAS = {"cuda"}


def extras() -> list[str]:
    """Return the extras of pyproject.toml that can be resolved without building a package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return sorted(project["optional-dependencies"].keys() - UNRESOLVABLE_EXTRAS)


def packages_without_dependencies() -> list[str]:
    """Return requirements that tools/install.py installs with --no-deps."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [package for packages in project["tool"]["quire"]["without-dependencies"].values() for package in packages]


def resolve(uv: list[str], *arguments: str, requirements: Path = ROOT / "pyproject.toml") -> None:
    """Run `uv pip compile` with the public index and no settings of this machine.

    Raises subprocess.CalledProcessError with uv's explanation in stderr.
    """
    command = [*uv, "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    subprocess.run(
        [*command, *arguments, str(requirements)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )


def write(uv: list[str], upgrade: list[str]) -> None:
    """Write constraints.txt. Raises subprocess.CalledProcessError."""
    pins: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder, "alone.txt")
        alone.write_text("\n".join(packages_without_dependencies()), encoding="utf-8")
        every_extra = [f"--extra={extra}" for extra in extras()]
        for requirements, options in ((ROOT / "pyproject.toml", every_extra), (alone, ["--no-deps"])):
            output = Path(folder, "constraints.txt")
            if FILE.exists():
                shutil.copy(FILE, output)  # uv keeps the pins that it finds in its output file
            options += ["--universal", "--python-version", "3.11", "--output-file", str(output), *upgrade]
            resolve(uv, *options, requirements=requirements)
            pins.update(output.read_text(encoding="utf-8").splitlines())
    FILE.write_text(HEADER + "\n".join(sorted(pins)) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Install uv into a temporary environment, so that broken pins can be mended by it, and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
        try:
            write([f"{folder}/bin/python", "-m", "uv"], arguments)
        except subprocess.CalledProcessError as error:
            print(error.stderr, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
