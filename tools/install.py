"""Creates the virtual environment VENV and installs quire and EXTRA: `python tools/install.py VENV [EXTRA]`.

One line per phase goes to the terminal. The full output of pip goes to VENV/install.log, and to the terminal when an
installation fails. pip reads its PIP_* variables as always (PIP_EXTRA_INDEX_URL for another build of PyTorch, for
example). This script runs before any package is installed: it needs the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
SERVING = "files"  # the extra of every installation
LARGE_MB = 20.0  # minimum size of a download that gets a line
QUIET_SECONDS = 15.0  # after this long without a line, report what pip is doing
_DOWNLOAD = re.compile(r"\s*(?:Downloading|Using cached) (?:\S*/)?([^\s/]+) \(([\d.]+) (MB|GB)\)")
_STEP = re.compile(r"\s*(?:Collecting|Downloading|Building|Preparing|Getting|Installing) ")


class KernelBuild:
    """Compiles the native CPU kernels for this CPU while pip downloads, so that the first answer is fast.

    Does nothing if they exist, if there is no compiler, or if another process compiles them.
    """

    def __init__(self) -> None:
        spec = importlib.util.spec_from_file_location("quire_build_kernels", ROOT / "worker" / "cpu" / "build.py")
        self.kernels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.kernels)
        self.level = self.kernels.cpu_level()
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        if self.level is None or self.kernels.find_library(self.level):
            return
        if self.kernels.compiler() is None:
            say("note: no C++ compiler, so no native CPU kernels: answers take 3 to 20 times as long. Install g++")
            return
        self.target = self.kernels.cache_folder() / self.kernels.library_name(self.level, self.kernels.compiler())
        command = [sys.executable, self.kernels.__file__, "--no-wait", "--level", self.level]
        self.process = subprocess.Popen(
            [*command, "--into", self.target.parent], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        say(f"compiling the native CPU kernels ({self.level}) meanwhile")

    def finish(self) -> None:
        """Wait for the compiler, and report its progress. A failure is no error: plain torch serves."""
        if self.process is None:
            return
        while self.process.poll() is None:
            say("  the native CPU kernels: {} of {} files compiled".format(*self.kernels.progress(self.target)))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(QUIET_SECONDS)
        if self.process.returncode not in (0, self.kernels.BUSY):
            say(f"note: the native CPU kernels cannot be compiled; serving without them\n{self.process.stdout.read()}")

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


class InstallError(Exception):
    """Raised when the installation fails; the text has the reason and the remedy."""


class Installer:
    """Runs the phases of one installation, one after another."""

    def __init__(self, venv: Path, extra: str | None):
        self.venv, self.extra = venv, extra
        self.python = venv / "bin" / "python"
        # exists while pip changes the environment: a leftover means that an installation was interrupted
        self.marker = venv / ".installing"

    def run(self) -> None:
        """Run all phases. Raises InstallError."""
        self._create_venv()
        was_interrupted = self.marker.exists()
        self.marker.touch()
        quire = f".[{','.join(filter(None, (SERVING, self.extra)))}]"
        if was_interrupted:
            # Overwrite the files of incomplete packages: pip cannot uninstall them, and may take them for complete.
            self._pip("everything again: the last installation was interrupted", ["--ignore-installed", "-e", quire])
        elif self.extra:
            self._pip(f"the packages of [{self.extra}]", ["-e", quire])
        else:
            self._pip("PyTorch", ["torch"])
            self._pip("quire and the packages that serving needs", ["-e", quire])
        if packages := without_dependencies(self.extra or ""):
            self._pip(f"{', '.join(packages)} without dependencies", ["--no-deps", *packages])
        self.marker.unlink()
        say(note_on_torch(self.venv))

    def _create_venv(self) -> None:
        if self._runs("-m", "pip", "--version"):
            return
        # one whose interpreter was removed, by an upgrade for example: its packages are for that one
        stale = ["--clear"] if (self.venv / "pyvenv.cfg").exists() and not self._runs("--version") else []
        say(f"creating a virtual environment in {self.venv}{': its Python does not run' if stale else ''}")
        command = [sys.executable, "-m", "venv", *stale, self.venv]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            output = f"{result.stdout}{result.stderr}"
            remedy = "; on Debian and Ubuntu, apt-get install python3-venv" if "ensurepip" in output else ""
            raise InstallError(f"{output}cannot create a virtual environment in {self.venv}{remedy}")

    def _runs(self, *arguments: str) -> bool:
        try:
            return subprocess.run([self.python, *arguments], capture_output=True, check=False).returncode == 0
        except OSError:
            return False

    def _pip(self, title: str, arguments: list[str]) -> None:
        """Call `pip install`. Raises InstallError with its output."""
        started = time.monotonic()
        say(f"installing {title}")
        command = [
            self.python,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--progress-bar",
            "off",
            "-c",
            "constraints.txt",
            *arguments,
        ]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        try:
            output = self._follow(process)
        except KeyboardInterrupt:  # pip got the same signal
            process.wait()
            raise
        if process.returncode:
            if process.returncode > 0 and "Installing collected packages" not in output:
                self.marker.unlink()  # pip had not changed the environment yet
            reason = (
                ": the package index did not answer" if "Retrying (" in output else ""
            )  # pip's last lines then name conflicting versions
            raise InstallError(
                f"{output[-6000:]}\ncannot install {title}{reason} "
                f"(the output of pip is above, all of it in {self.venv}/install.log)"
            )
        say(f"  done in {time.monotonic() - started:.0f} s")

    def _follow(self, process: subprocess.Popen) -> str:
        """Return the whole output, which is also written to the log. Prints the long phases."""
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=read_lines, args=(process, lines), daemon=True).start()
        output, doing, last = [], "pip starts", time.monotonic()
        with open(self.venv / "install.log", "a", encoding="utf-8") as log:
            while True:
                try:
                    line = lines.get(timeout=1)
                except queue.Empty:
                    if time.monotonic() - last > QUIET_SECONDS:
                        last = time.monotonic()
                        say(f"  still working: {doing}")
                    continue
                if line is None:
                    break
                output.append(line)
                log.write(line)
                progress = progress_of(line)
                if progress or _STEP.match(line):
                    doing = progress or line.strip()[:100]
                if progress:
                    last = time.monotonic()
                    say(f"  {progress}")
        process.wait()
        return "".join(output)


def without_dependencies(extras: str) -> list[str]:
    """Return the packages of `extras` (separated by commas) that pyproject.toml wants without their dependencies."""
    import tomllib  # needs Python 3.11, which main() has checked

    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["quire"]
    return [package for extra in extras.split(",") for package in table["without-dependencies"].get(extra, [])]


def read_lines(process: subprocess.Popen, lines: queue.Queue[str | None]) -> None:
    """Put each line of the output of `process` into `lines`, then None."""
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def progress_of(line: str) -> str | None:
    """Return the message for a line of pip's output, or None."""
    if (match := _DOWNLOAD.match(line)) and float(match[2]) * {"MB": 1, "GB": 1000}[match[3]] >= LARGE_MB:
        return (
            f"downloading {match[1]} ({match[2]} {match[3]})"
            if "Downloading" in line
            else f"from pip's cache: {match[1]}"
        )
    if line.startswith("Installing collected packages:"):
        num_packages = line.count(",") + 1
        return f"unpacking {num_packages} packages" if num_packages > 1 else "unpacking 1 package"
    return None


def note_on_torch(venv: Path) -> str:
    """Return one line about PyTorch's build if it does not fit the machine, else ""."""
    version = next(venv.glob("lib/python3.*/site-packages/torch/version.py"), None)
    has_cuda_build = version is not None and re.search(
        r"^cuda\b[^=]*= *'", version.read_text(encoding="utf-8"), re.MULTILINE
    )
    if not has_cuda_build or Path("/proc/driver/nvidia").exists():
        return ""
    return (
        "note: this is PyTorch's CUDA build, and this machine has no NVIDIA GPU. It works. To save some GB, set "
        "PIP_EXTRA_INDEX_URL to the package index of PyTorch's CPU builds (PyTorch's site shows it), run make clean, "
        "and install again"
    )


def say(text: str) -> None:
    if text:
        print(text, flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Create a virtual environment and install quire into it.")
    parser.add_argument("venv", metavar="VENV", type=os.path.abspath)
    parser.add_argument("extra", metavar="EXTRA", nargs="?", help="extras of pyproject.toml, separated by commas")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Install, and return 1 if that fails."""
    arguments = parse(argv)
    if sys.version_info < OLDEST_PYTHON:
        say(
            f"quire needs Python {'.'.join(map(str, OLDEST_PYTHON))} or later, but this is {sys.version.split()[0]}: "
            "make PYTHON=/path/to/python3 ..."
        )
        return 1
    kernels = KernelBuild()
    try:
        if arguments.extra is None:
            kernels.start()
        Installer(Path(arguments.venv), arguments.extra).run()
        kernels.finish()
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the next make continues from here", file=sys.stderr)
        return 130
    finally:
        kernels.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
