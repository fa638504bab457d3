"""Lists the packages of a GPU machine that cannot install any: those of its image, and the wheels carried there.

Imported as a pytest plugin (`-p tests.helpers.worker.gpu_image`), it hides every other installed package.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

# names of distributions; of a machine learning image with CUDA, as far as quire and its tests may meet them
# fmt: off
IMAGE = [
    "accelerate", "aiohttp", "aiosignal", "aiohappyeyeballs", "annotated-doc", "anyio", "attrs", "certifi",
    "charset-normalizer", "click", "cloudpickle", "coverage", "einops", "execnet", "filelock", "frozenlist",
    "fsspec", "h11", "hf-xet", "httpcore", "httpx", "huggingface-hub", "hypothesis", "idna", "iniconfig",
    "jinja2", "joblib", "markdown-it-py", "markupsafe", "matplotlib", "mdurl", "mpmath", "msgpack", "multidict",
    "networkx", "ninja", "numpy", "packaging", "pandas", "pillow", "pip", "pluggy", "prometheus-client",
    "propcache", "protobuf", "psutil", "pygments", "pytest", "pytest-timeout", "pytest-xdist", "pyyaml",
    "regex", "requests", "rich", "safetensors", "scikit-learn", "scipy", "sentence-transformers",
    "sentencepiece", "setuptools", "shellingham", "six", "sortedcontainers", "sympy", "threadpoolctl",
    "tiktoken", "tokenizers", "torch", "tqdm", "transformers", "triton", "typer", "typing-extensions",
    "urllib3", "uvloop", "wheel", "yarl",
]
# other packages that quire needs
CARRIED = [
    "fastapi", "starlette", "opentelemetry-api", "pydantic", "pydantic-core", "annotated-types",
    "typing-inspection", "uvicorn", "httptools", "pyzmq", "msgspec", "llguidance", "openai", "httpx2", "httpcore2",
    "truststore", "jiter", "sniffio", "quire",
]
# fmt: on
NOT_NEEDED = {"cutlass", "nvidia"}  # namespaces that several distributions share


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hidden_modules() -> set[str]:
    """Top-level modules of installed distributions that the machine does not have."""
    there = {canonical(name) for name in [*IMAGE, *CARRIED]}
    return {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if not any(canonical(name) in there for name in distributions) and module not in NOT_NEEDED
    }


class Hiding:
    """Wraps `finder`, hiding everything below `modules`."""

    def __init__(self, finder, modules: set[str]):
        self.finder, self.modules = finder, modules

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.modules else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


_hidden = hidden_modules()
sys.meta_path[:] = [Hiding(finder, _hidden) if hasattr(finder, "find_spec") else finder for finder in sys.meta_path]
