"""Fixtures for every folder.

`checkpoint("qwen3")` is the folder of a small random model (helpers/models/checkpoints.py), built once per session.
"""

from __future__ import annotations

import os

from tests.helpers.gpu import has_gpu

# compiled modules are kept: each of the several hundred servers that tests start would compile them again for a second
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are decorated, so before any test module imports one

import contextlib
import gc
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from quire.worker.cpu import build
from tests.helpers.engine.forked import IMPORTANT, forked_engines
from tests.helpers.models.checkpoints import build_checkpoint

# a background job of a script; processes that tests start would ignore Ctrl-C, too
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# on a busy machine, drawing may be slow
settings.register_profile("shrink", suppress_health_check=[HealthCheck.too_slow], deadline=None)
# shrinking takes up to five minutes, as long as a test may take: a failure would be reported as a timeout
settings.register_profile(
    "quire", settings.get_profile("shrink"), phases=set(Phase) - {Phase.shrink, Phase.explain}, print_blob=True
)
settings.load_profile("quire")


sys.dont_write_bytecode = False


# Files that take a minute or more, the longest first: begun last, one would leave the other processes without work.
LONG_FILES = [
    "worker/cpu/test_emulated_kernels.py",
    "end_to_end/test_families.py",
    "worker/models/test_fallback.py",
    "end_to_end/test_recovery.py",
    "benchmarks/test_gpu.py",
    "server/test_launch.py",
    "server/frontends/test_fleet.py",
    "end_to_end/test_equals_transformers.py",
    "end_to_end/test_images.py",
    "worker/cuda/kernels/test_triton_quantized.py",
    "worker/quantize/test_quantize.py",
    "worker/lora/test_lora.py",
    "worker/sampling/test_prediction_head.py",
    "end_to_end/test_structured_output.py",
    "server/http/test_bounds.py",
    "server/http/test_connections.py",
]


# a file all of whose tests are slow
SLOW_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files of slow tests out of `make quick` before they are imported: in each process that took seconds."""
    if config.option.markexpr == "not slow" and collection_path.suffix == ".py":
        return bool(SLOW_FILE.search(collection_path.read_text(encoding="utf-8"))) or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what all tests share, millions of objects, out of every garbage collection: one took seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _one_torch_thread():
    if "torch" in sys.modules:  # do not import it for this check
        torch = sys.modules["torch"]
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _same_environment():
    """Fail a module that leaves another environment to the modules after it. Libraries set their own: those with which
    later engines could not be forked are reset.
    """
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    changed = {name for name in changed if name.startswith(("QUIRE_", "FAKE_", *IMPORTANT))}
    for name in changed:
        os.environ.pop(name, None)
    os.environ.update({name: before[name] for name in changed & before.keys()})
    ours = sorted(name for name in changed if name.startswith(("QUIRE_", "FAKE_")))
    assert not ours, f"left in os.environ: {ours}"


@pytest.fixture(scope="session", autouse=True)
def _forked_engines() -> Iterator[None]:
    with contextlib.nullcontext() if has_gpu() else forked_engines():  # CUDA may not be forked
        yield


@pytest.fixture(scope="session")
def _kernels_in_the_cache(request) -> None:
    """Compile the kernels once; otherwise, on a fresh machine, every server in the tests would compile them. The GPU's
    tests do not use them.
    """
    if request.config.getoption("markexpr") == "gpu":
        return
    if (level := build.cpu_level()) and build.compiler() and build.find_library(level) is None:
        build.build(level, build.cache_folder())


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, _kernels_in_the_cache) -> Callable[..., str]:
    """`checkpoint(name, sharded=False, dtype="float32", **config_overrides) -> folder`.

    Treat the folder as read-only.
    """
    built: dict[str, str] = {}

    def get(name: str, **options) -> str:
        key = repr((name, sorted(options.items())))
        if key not in built:
            built[key] = build_checkpoint(name, tmp_path_factory.mktemp(name), **options)
        return built[key]

    return get
