"""How the native kernels come to be: built once, found again, built in the background while torch serves, and done
without where they cannot be.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from quire.cli import main as cli
from quire.worker.cpu import background_build, build
from quire.worker.cpu.native import Kernels
from tests.helpers.server.running import poll

pytestmark = pytest.mark.skipif(build.cpu_level() is None or build.compiler() is None, reason="no native kernels here")

# Takes a moment, or until the file $GATE exists, with a temporary file meanwhile, and "links" by copying a library that
# exists. Counts its links.
COMPILER = """#!/bin/sh
temporary=$(mktemp)
sleep ${{DELAY:-{delay}}}
while [ -n "$GATE" ] && [ ! -e "$GATE" ]; do sleep 0.05; done
rm "$temporary"
while [ $# -gt 0 ]; do
  [ "$1" = -shared ] && shared=1
  [ "$1" = -o ] && out="$2"
  shift
done
if [ -n "$shared" ]; then cp {library} "$out"; echo x >> {count}; else : > "$out"; fi
exit {code}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return Path(
        shutil.copy(
            build.build(build.cpu_level(), build.cache_folder()), tmp_path_factory.mktemp("real") / "library.so"
        )
    )


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch, library):
    """`fake_compiler(delay=0, code=0)` puts a stand-in into $CXX, and an empty cache under `tmp_path`.

    Returns how many links it has done.
    """
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "prebuilt_folder", lambda: tmp_path / "prebuilt")

    def make(delay: float = 0, code: int = 0):
        path, count = tmp_path / "c++", tmp_path / "count"
        path.write_text(COMPILER.format(delay=delay, library=library, count=count, code=code))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(path))
        return lambda: len(count.read_text().splitlines()) if count.exists() else 0

    return make


def _wait(kernels: Kernels) -> bool:
    deadline = time.monotonic() + 30
    while kernels.building and time.monotonic() < deadline:
        if kernels.poll():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
def test_the_first_start_goes_on_and_the_kernels_arrive_later(fake_compiler):
    fake_compiler(delay=0.2)
    kernels = Kernels()
    started = time.monotonic()
    assert not kernels.load() and kernels.lib is None and kernels.building
    assert time.monotonic() - started < 0.4 and "background" in kernels.status
    assert _wait(kernels) and kernels.lib is not None and not kernels.building
    assert not kernels.poll()
    again = Kernels()
    assert again.load() and "native kernels" in again.status  # found in the cache


@pytest.mark.slow
def test_a_builder_that_need_not_wait_ends_at_once(fake_compiler, tmp_path):
    links, gate = fake_compiler(), tmp_path / "gate"
    command = [sys.executable, build.__file__, "--level", build.cpu_level(), "--into", str(build.cache_folder())]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"GATE": str(gate)})
    target = build.cache_folder() / build.library_name(build.cpu_level(), os.environ["CXX"])
    poll(lambda: build.is_being_built(target))
    others = [subprocess.Popen([*command, "--no-wait"], stderr=subprocess.DEVNULL) for _ in range(3)]
    assert [other.wait(10) for other in others] == [build.BUSY] * 3 and first.poll() is None
    gate.touch()
    assert first.wait(30) == 0 and links() == 1 and not build.is_being_built(target)


@pytest.mark.slow
def test_a_start_starts_no_builder_beside_another_and_takes_over_if_it_dies(fake_compiler):
    links = fake_compiler(delay=0.1)
    command = [sys.executable, build.__file__, "--level", build.cpu_level(), "--into", str(build.cache_folder())]
    other = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"DELAY": "60"}, process_group=0)
    target = build.cache_folder() / build.library_name(build.cpu_level(), os.environ["CXX"])
    poll(lambda: build.is_being_built(target))
    before = set(psutil.Process().children())
    kernels = Kernels()
    assert not kernels.load() and kernels.building and set(psutil.Process().children()) == before
    assert f"0 of {len(list(build.SOURCES.glob('*.cpp')))} files" in kernels.status
    os.killpg(other.pid, signal.SIGKILL)
    other.wait()
    assert _wait(kernels) and kernels.loaded_at is not None and links() == 1


@pytest.mark.slow
def test_the_progress_is_shown(fake_compiler, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(background_build, "REPORT_INTERVAL", 0.2)
    fake_compiler(delay=0.2)
    kernels = Kernels()
    kernels.load()
    shown = set()
    while not kernels.poll():
        shown.add(kernels.status)
        time.sleep(0.02)
    assert len(shown) > 2 and any(f"{status}; plain torch serves meanwhile" in caplog.text for status in shown)


@pytest.mark.slow
def test_check_builds_nothing(fake_compiler, tmp_path):
    fake_compiler(delay=60)
    command = [sys.executable, "-m", "quire", "check", "--device", "cpu"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "are not built yet: quire serve does it at its start" in shown
    assert not build.cache_folder().exists()


@pytest.mark.slow
def test_without_a_compiler_check_warns_of_the_factor_and_the_remedy(fake_compiler, monkeypatch):
    fake_compiler()
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    command = [sys.executable, "-m", "quire", "check", "--device", "cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    warnings = [line for line in ended.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1 and "20 times slower" in warnings[0] and "install g++" in warnings[0]


def test_libraries_need_no_newer_system_than_wheels_may(library):
    """objdump reads the versions of the symbols."""
    shown = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
    versions = set(re.findall(r"\(?(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)\)?", shown))
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}  # manylinux_2_28
    assert {name for name, _ in versions} >= {"GLIBC", "GLIBCXX"}
    assert not [(name, v) for name, v in versions if tuple(map(int, v.split("."))) > newest[name]]
    assert build.newer_symbols(library) == []
    assert build.newer_symbols(Path(sys.executable).resolve()) != []  # the system's own programs want its own C library


@pytest.mark.slow
def test_two_builders_build_once(fake_compiler):
    links = fake_compiler(delay=0.1)
    command = [sys.executable, build.__file__, "--level", build.cpu_level(), "--into", str(build.cache_folder())]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = {builder.communicate()[0] for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0] and len(outputs) == 1
    assert links() == 1
    assert sorted(path.suffix for path in build.cache_folder().iterdir()) == [".lock", ".so"]  # nothing half done stays


def test_a_builder_that_is_killed_leaves_nothing_for_long(fake_compiler, tmp_path):
    fake_compiler()
    temporary, cache = tmp_path / "temporary", build.cache_folder()
    temporary.mkdir()
    command = [sys.executable, build.__file__, "--level", build.cpu_level(), "--into", str(cache)]
    builder = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(temporary), "DELAY": "60"}, process_group=0
    )
    poll(
        lambda: (
            len(list(cache.glob(".build-*/tmp.*")))
            == min(build._num_compilers(), len(list(build.SOURCES.glob("*.cpp"))))
        )
    )
    os.killpg(builder.pid, signal.SIGKILL)  # as an engine's group is, with the server
    builder.wait()
    assert not list(temporary.iterdir())
    build.build(build.cpu_level(), cache)
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".so"]


def test_a_builder_goes_on_where_the_last_one_was_killed(fake_compiler, monkeypatch):
    """Or starts that end within seconds would never get their kernels."""
    fake_compiler()
    run, compiled = subprocess.run, []

    def compile(command: list[str], **options):
        if len(compiled) == 3:
            raise ProcessLookupError
        compiled.append(command[-3])
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", compile)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(ProcessLookupError):
        build.build(build.cpu_level(), build.cache_folder())
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: compiled.append(command[-3]) or run(command, **options)
    )
    path = build.build(build.cpu_level(), build.cache_folder())
    assert compiled[:-1] == sorted(map(str, build.SOURCES.glob("*.cpp"))) and path.exists()  # each once, then the link
    assert sorted(path.suffix for path in path.parent.iterdir()) == [".lock", ".so"]


@pytest.mark.parametrize(
    ("files", "compilers"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000", "memory.max": "max"}, 16),
        ({"cpu.max": "250000 100000"}, 2),  # docker run --cpus 2.5
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "765000", "cpu/cpu.cfs_period_us": "100000"}, 7),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        ({"memory.max": str(2 << 30)}, 2),
        ({"memory/memory.limit_in_bytes": str(1 << 28)}, 1),
        ({"cpu.max": "400000 100000", "memory.max": str(64 << 30)}, 4),
    ],
)
def test_a_container_gets_as_many_compilers_as_it_has_cores_and_memory(monkeypatch, tmp_path, files, compilers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 65536, "SC_PHYS_PAGES": 1 << 20}[name])  # 64 GiB
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert build._num_compilers(tmp_path) == compilers


def test_a_small_machine_gets_fewer_compilers(monkeypatch, tmp_path):
    """A Raspberry Pi of four cores and 1 GiB."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 18}[name])
    assert build._num_compilers(tmp_path) == 1


def test_a_failing_compiler_is_reported_and_torch_goes_on_serving(fake_compiler, caplog):
    fake_compiler(code=1)
    kernels = Kernels()
    assert not kernels.load()
    assert not _wait(kernels) and kernels.lib is None and not kernels.building
    assert "failed" in kernels.status and "failed" in caplog.text
    with pytest.raises(build.BuildError, match="failed"):
        build.build_kernels(levels=[build.cpu_level()])


def test_without_a_compiler_a_cached_library_is_still_used(fake_compiler, monkeypatch):
    fake_compiler()
    build.build(build.cpu_level(), build.cache_folder())
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    assert Kernels().load()
    shutil.rmtree(build.cache_folder())
    kernels = Kernels()
    assert not kernels.load() and "no C++ compiler" in kernels.status and not kernels.building


def test_prebuilt_libraries_need_neither_compiler_nor_cache(fake_compiler, monkeypatch):
    fake_compiler()
    assert len(build.build_kernels()) == len(build.levels_of(build.machine()))
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    assert Kernels().load()
    assert not build.cache_folder().exists() or {path.suffix for path in build.cache_folder().iterdir()} == {
        ".calibration"
    }


def test_a_library_that_cannot_be_loaded_is_no_catastrophe(fake_compiler):
    fake_compiler()
    path = build.build(build.cpu_level(), build.cache_folder())
    path.write_bytes(b"not a library")
    kernels = Kernels()
    assert not kernels.load() and "no native kernels" in kernels.status


def test_the_name_follows_sources_flags_and_compiler(fake_compiler, monkeypatch, tmp_path):
    fake_compiler()
    cxx = os.environ["CXX"]
    names = {build.library_name(level, cxx) for level in build.levels_of(build.machine())}
    assert len(names) == len(build.levels_of(build.machine()))
    name = build.library_name("avx2", cxx)
    os.utime(cxx, (1, 1))
    assert build.library_name("avx2", cxx) != name
    sources = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    prefix = build.library_prefix("avx2")
    (sources / "simd.h").write_text((sources / "simd.h").read_text() + "\n")
    assert build.library_prefix("avx2") != prefix


@pytest.mark.slow
def test_the_command_builds_ahead_into_a_folder_or_the_package(fake_compiler, tmp_path, capsys):
    links = fake_compiler()
    assert (
        cli.main(["build-kernels", "--into", str(tmp_path / "wheel"), "--level", "avx2", "--level", build.cpu_level()])
        == 0
    )
    shown = capsys.readouterr()
    paths = [Path(line) for line in shown.out.split()]
    levels = list(dict.fromkeys(["avx2", build.cpu_level()]))
    for level in levels:
        assert f"compiling kernels for {level}: 0 of " in shown.err
        assert re.search(rf"^compiling kernels for {level}: (\d+) of \1 files$", shown.err, re.MULTILINE)
    assert [path.is_file() and path.parent == tmp_path / "wheel" for path in paths] == [True] * len(
        paths
    ) and links() == len(levels)
    assert build.find_library(build.cpu_level()) is None  # a start does not look there
    levels = build.levels_of(build.machine())
    assert cli.main(["build_kernels"]) == 0 and len(list((tmp_path / "prebuilt").glob("*.so"))) == len(levels)
    assert Path(build.find_library(build.cpu_level())).parent == tmp_path / "prebuilt"


def test_the_command_says_why_it_failed(fake_compiler, tmp_path, monkeypatch, capsys):
    fake_compiler()
    (tmp_path / "file").write_text("")
    assert cli.main(["build-kernels", "--into", str(tmp_path / "file" / "below")]) == 1
    assert "file" in capsys.readouterr().err
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    assert cli.main(["build-kernels"]) == 1 and "no C++ compiler" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        cli.main(["build-kernels", "--level", "sse9"])
    assert exit.value.code == 2 and "sse9" in capsys.readouterr().err


def test_an_unknown_level_is_an_error():
    with pytest.raises(ValueError, match="sse9"):
        build.build_kernels(levels=["sse9"])


def test_this_cpus_level_is_built_first(fake_compiler, tmp_path):
    fake_compiler()
    assert build.cpu_level() in build.build_kernels(tmp_path / "wheel")[0].name


def test_a_level_may_be_asked_for(fake_compiler):
    fake_compiler()
    assert build.choose_level("avx2") == ("avx2", "as asked")
    kernels = Kernels()
    assert (
        kernels.load(background=False, level="avx2")
        and kernels.level == "avx2"
        and "(avx2)" in kernels.status
        and kernels.level_reason == "as asked"
    )


def test_a_level_that_the_cpu_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(build, "cpu_levels", lambda: ["avx512", "avx2"])
    with pytest.raises(ValueError, match=r"cpu_level 'amx' .* auto, avx512, avx2"):
        build.choose_level("amx")


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "chosen"), [("0.80 1:0.7", "avx2"), ("0.97 1:0.97", "avx512"), ("1.5", "avx512")])
def test_a_narrower_level_is_taken_where_it_measured_faster(fake_compiler, monkeypatch, ratio, chosen):
    fake_compiler()
    monkeypatch.setattr(build, "cpu_levels", lambda: ["avx512", "avx2"])
    assert build.choose_level() == ("avx512", "this CPU's best")  # nothing to measure yet
    for level in ("avx512", "avx2"):
        build.build(level, build.cache_folder())
    measured = []

    def run(command, **options):
        measured.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=ratio)

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        level, reason = build.choose_level()
        assert level == chosen and "measured" in reason
    assert len(measured) == 1  # then it is in the cache


def test_calibration_measures_two_libraries(library):
    output = subprocess.run(
        [sys.executable, Path(build.__file__).with_name("calibration.py"), library, library],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    mean, *ratios = output.split()
    assert 0.2 < float(mean) < 5 and len(ratios) == 4


def test_a_cache_folder_that_is_a_file_has_no_build(tmp_path):
    (tmp_path / "file").touch()
    assert not build.is_being_built(tmp_path / "file" / "kernels" / "library.so")
