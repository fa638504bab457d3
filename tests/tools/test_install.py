"""What `make serve` and `make test` install and print, and how they handle an interruption. A script replaces pip."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from quire.worker.cpu import build
from tools import install

ROOT = Path(__file__).parent.parent.parent
FAKE_PYTHON = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in
  *"pip --version") exit 0 ;;
esac
{script}
"""
GOOD = """echo 'Collecting torch'
echo '  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (190.4 MB)'
echo '  Downloading h11-0.16.0-py3-none-any.whl (0.1 MB)'
echo 'Installing collected packages: torch, h11'
echo 'Successfully installed h11-0.16.0 torch-2.13.0'"""


@pytest.fixture(autouse=True)
def _kernels(_kernels_in_the_cache):
    """So that none are compiled."""


@pytest.fixture
def venv(tmp_path):
    """Make a fake virtual environment whose pip runs `script`."""

    def make(script: str) -> Path:
        (tmp_path / "venv" / "bin").mkdir(parents=True, exist_ok=True)
        python = tmp_path / "venv" / "bin" / "python"
        python.write_text(FAKE_PYTHON.format(calls=tmp_path / "calls", script=script))
        python.chmod(0o755)
        return tmp_path / "venv"

    return make


def pip_calls(venv: Path) -> list[str]:
    return [call for call in (venv.parent / "calls").read_text().splitlines() if " install " in call]


def dry_run(target: str, tmp_path: Path) -> str:
    return subprocess.run(
        ["make", "-n", target, f"VENV={tmp_path}/none"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_serving_installs_nothing_of_the_developers(tmp_path):
    assert "install.py" in dry_run("serve", tmp_path) and " dev" not in dry_run("serve", tmp_path)
    assert f"tools/install.py {tmp_path}/none dev" in dry_run("test", tmp_path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 14
    names = " ".join(project["dependencies"])
    assert not [name for name in ("ray", "triton", "hypothesis", "pytest", "matplotlib", "openai") if name in names]


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), ([], 2), (["--into", "x"], 2), (["x", "dev", "y"], 2)])
def test_a_flag_is_no_folder(argv, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        install.main(argv)
    assert caught.value.code == code and not list(tmp_path.iterdir())


def test_a_line_for_each_phase_and_no_noise(venv, monkeypatch, capsys):
    monkeypatch.setattr(install.KernelBuild, "start", lambda self: None)  # it depends on the machine
    folder = venv(GOOD)
    assert install.main([str(folder)]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if not line.startswith("  done in")] == [
        "installing PyTorch",
        "  downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (190.4 MB)",
        "  unpacking 2 packages",
        "installing quire and the packages that serving needs",
        "  downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (190.4 MB)",
        "  unpacking 2 packages",
    ]
    calls = pip_calls(folder)
    assert (
        calls[0].endswith("-c constraints.txt torch")
        and calls[1].endswith("-c constraints.txt -e .[files]")
        and len(calls) == 2
    )
    assert "Successfully installed" in (folder / "install.log").read_text()
    assert install.main([str(folder), "dev"]) == 0 and pip_calls(folder)[2].endswith("-e .[files,dev]")


def test_packages_without_their_dependencies(venv, capsys):
    folder = venv(GOOD)
    assert install.main([str(folder), "dev,clients"]) == 0
    calls = pip_calls(folder)
    assert calls[0].endswith("-e .[files,dev,clients]")
    assert calls[1].endswith("-c constraints.txt --no-deps instructor>=1.17")
    assert "installing instructor>=1.17 without dependencies" in capsys.readouterr().out


@pytest.mark.slow
def test_a_silent_pip_does_not_look_dead(venv, capsys, monkeypatch):
    monkeypatch.setattr(install, "QUIET_SECONDS", 0.5)
    folder = venv("echo 'Collecting torch'; sleep 3")
    assert install.main([str(folder), "dev"]) == 0
    assert "still working: Collecting torch" in capsys.readouterr().out


def test_a_failure_shows_what_pip_said(venv, capsys):
    folder = venv("echo 'ERROR: No matching distribution found for torch'; exit 1")
    assert install.main([str(folder)]) == 1
    error = capsys.readouterr().err
    assert "No matching distribution found" in error and "cannot install PyTorch" in error
    assert install.main([str(folder)]) == 1
    assert not [call for call in pip_calls(folder) if "--ignore-installed" in call]  # pip had changed nothing


def test_an_index_that_does_not_answer_is_not_taken_for_a_conflict(venv, capsys):
    folder = venv(
        "echo 'WARNING: Retrying (Retry(total=0)) after connection broken'; echo 'ERROR: ResolutionImpossible'; exit 1"
    )
    assert install.main([str(folder)]) == 1
    assert "cannot install PyTorch: the package index did not answer" in capsys.readouterr().err


def test_after_an_interruption_everything_is_written_again(venv, tmp_path):
    folder = venv("echo 'Installing collected packages: torch'; sleep 60")
    process = subprocess.Popen(
        [sys.executable, "tools/install.py", str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True, process_group=0
    )
    while "unpacking" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    venv(GOOD)
    assert install.main([str(folder)]) == 0
    assert pip_calls(folder)[-1].endswith("--ignore-installed -e .[files]") and len(pip_calls(folder)) == 2
    assert install.main([str(folder)]) == 0
    assert not any("--ignore-installed" in call for call in pip_calls(folder)[-2:])


@pytest.mark.slow
def test_an_environment_whose_python_was_removed_is_made_anew(tmp_path, capsys):
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /gone/bin\n")
    (folder / "lib/python3.10/site-packages").mkdir(parents=True)
    for name in (".installed-serve", ".installed-dev"):
        (folder / name).touch()
    (folder / "bin/python").symlink_to("python3")
    (folder / "bin/python3").symlink_to("/gone/bin/python3")
    planned = subprocess.run(
        ["make", "-n", "serve", f"VENV={folder}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "tools/install.py" in planned, "the stamps hide that there is no interpreter"
    install.Installer(folder, None)._create_venv()
    assert subprocess.run([folder / "bin/python", "-m", "pip", "--version"], check=False).returncode == 0
    assert not (folder / "lib/python3.10").exists() and "its Python does not run" in capsys.readouterr().out


def test_the_remedy_for_a_python_without_ensurepip_is_for_it_alone(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(install.InstallError) as error:
        install.Installer(tmp_path / "file", None)._create_venv()
    assert "cannot create a virtual environment" in str(error.value) and "apt-get" not in str(error.value)


def test_ctrl_c_ends_in_order(venv):
    folder = venv("echo 'Installing collected packages: torch'; sleep 60")
    process = subprocess.Popen(
        [sys.executable, "tools/install.py", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    while "unpacking" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 130 and "the next make continues from here" in error and "Traceback" not in error


def test_an_unneeded_cuda_build_is_pointed_out(tmp_path, monkeypatch):
    version = tmp_path / "lib" / "python3.11" / "site-packages" / "torch" / "version.py"
    version.parent.mkdir(parents=True)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) != "/proc/driver/nvidia" and exists(path))
    version.write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n")
    assert "PIP_EXTRA_INDEX_URL" in install.note_on_torch(tmp_path)
    version.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert install.note_on_torch(tmp_path) == ""


COMPILER = """#!/bin/sh
sleep 0.3
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && out="$2"
  shift
done
: > "$out"
"""


@pytest.mark.slow
@pytest.mark.skipif(build.cpu_level() is None, reason="no native kernels here")
def test_the_kernels_are_compiled_while_pip_installs(venv, tmp_path, monkeypatch, capsys):
    (tmp_path / "c++").write_text(COMPILER)
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(install, "QUIET_SECONDS", 0.5)
    assert install.main([str(venv(GOOD))]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"compiling the native CPU kernels ({build.cpu_level()}) meanwhile\ninstalling PyTorch")
    num_files = len(list(build.SOURCES.glob("*.cpp")))
    assert f"of {num_files} files compiled" in shown
    assert build.find_library(build.cpu_level()).parent == tmp_path / "cache" / "kernels"
    assert install.main([str(venv(GOOD))]) == 0 and "compil" not in capsys.readouterr().out
    assert install.main([str(venv(GOOD)), "dev"]) == 0


def test_without_a_compiler_the_installer_says_what_is_missing(venv, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    assert install.main([str(venv(GOOD))]) == 0
    if build.cpu_level():
        assert "note: no C++ compiler" in capsys.readouterr().out
