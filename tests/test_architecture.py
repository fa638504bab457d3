"""The dependency rules of docs/architecture.md, held by walking the imports of every file and by starting the light
modules in a process of their own.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("configs", "engine", "server", "worker")
OURS = (*PACKAGES, "quire")


@dataclass(frozen=True)
class Import:
    module: str  # the importing file as a module: "quire.engine.scheduler"
    target: str  # what it imports: "quire.worker.messages"
    line: int
    at_start: bool  # when the module is imported: not inside a function or under TYPE_CHECKING

    def __str__(self) -> str:
        return f"{self.module.replace('.', '/')}.py:{self.line} imports {self.target}"


def modules() -> dict[str, Path]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports(module: str, tree: ast.AST, packages: set[str], at_start: bool = True) -> Iterator[Import]:
    """Every import below `tree`; `from package import module` names the module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, node.lineno, at_start) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            assert node.level == 0, f"{module} line {node.lineno}: relative import"
            for alias in node.names:
                target = f"{base}.{alias.name}" if f"{base}.{alias.name}" in packages else base
                yield Import(module, target, node.lineno, at_start)
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        yield from imports(module, node, packages, at_start and not deferred)


MODULES = modules()
IMPORTS = [
    found
    for module, path in MODULES.items()
    for found in imports(module, ast.parse(path.read_text(encoding="utf-8")), set(MODULES))
]


def within(module: str, *prefixes: str) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def select(*sources: str, of: tuple[str, ...] = OURS) -> list[Import]:
    """Imports made by modules under `sources` of modules under `of`."""
    return [found for found in IMPORTS if within(found.module, *sources) and within(found.target, *of)]


def test_the_walk_sees_the_project():
    assert {"quire.engine.messages", "quire.worker.messages", "quire.configs.config"} <= set(MODULES)
    assert any(found.module == "quire.engine.messages" and found.target == "quire.worker.messages" for found in IMPORTS)


@pytest.mark.parametrize(
    "package, allowed",
    [
        ("configs", ("configs",)),
        ("worker", ("worker", "configs")),
        ("engine", ("engine", "configs", "quire.worker.messages")),
        ("server", ("server", "configs", "quire.engine.messages")),
    ],
)
def test_packages_depend_in_one_direction(package, allowed):
    wrong = [str(found) for found in select(package) if not within(found.target, *allowed)]
    if package == "engine":  # the executors are where the worker enters
        wrong = [text for text in wrong if not text.startswith("engine/executor/")]
    assert not wrong


def test_executors_use_only_the_worker_itself():
    assert not [
        str(found)
        for found in select("quire.engine.executor", of=("worker", "server"))
        if not within(found.target, "quire.worker.worker", "quire.worker.messages")
    ]


@pytest.mark.parametrize("name", ["torch", "transformers", "numpy"])
def test_configs_server_and_messages_never_import(name):
    assert not [
        str(found)
        for found in select("configs", "server", "quire.engine.messages", "quire.worker.messages", of=(name,))
        if not _fallback(found)
    ]


def _fallback(found: Import) -> bool:
    """transformers may serve, lazily, tokenizers that have no tokenizer.json."""
    return found.module == "quire.server.text.tokenizer" and within(found.target, "transformers") and not found.at_start


def test_transformers_is_not_on_the_start_path():
    assert not [str(found) for found in select(*PACKAGES, of=("transformers",)) if found.at_start]


def test_engine_layers():
    """core -> scheduler -> kv_cache -> request, and nothing upward; only executors and the fake know tensors, if at
    all.
    """
    order = ["quire.engine.core", "quire.engine.scheduler", "quire.engine.kv.manager", "quire.engine.request"]
    for height, lower in enumerate(order):
        assert not [str(found) for found in select(lower, of=tuple(order[:height]))]
    assert not [
        str(found)
        for found in select("engine", of=("torch", "numpy"))
        if not within(found.module, "quire.engine.executor")
    ]


def test_worker_layers():
    """model_runner -> {models, attention, sampler, request_table}; models -> layers -> attention.base and parallel;
    nothing imports upward.
    """
    runner = ("quire.worker.model_runner", "quire.worker.worker")
    below_the_runner = (
        "quire.worker.models",
        "quire.worker.layers",
        "quire.worker.attention",
        "quire.worker.sampling.sampler",
        "quire.worker.sampling.processors",
        "quire.worker.batch.request_table",
        "quire.worker.batch.input_batch",
        "quire.worker.kernels",
        "quire.worker.loader",
        "quire.worker.parallel",
        "quire.worker.platforms.platform",
    )
    assert not [str(found) for found in select(*below_the_runner, of=runner)]
    assert not [str(found) for found in select("quire.worker.layers", of=("quire.worker.models",))]
    assert not [
        str(found) for found in select("quire.worker.attention", "quire.worker.kernels", of=("quire.worker.models",))
    ]
    assert not [
        str(found)
        for found in select("quire.worker.layers", "quire.worker.models", of=("quire.worker.attention",))
        if found.target != "quire.worker.attention.base"
    ]


def test_no_module_is_named_like_a_third_party_package():
    assert not {path.stem for path in (ROOT / "tests").glob("*.py")} & {"tokenizers", "queue", "openai"}
    assert not {module.rpartition(".")[2] for module in MODULES} & {"tokenizers", "queue", "torch", "openai"}


@pytest.mark.parametrize(
    "module",
    [
        "quire.cli.main",
        "quire.configs.config",
        "quire.engine.messages",
        "quire.worker.messages",
        "quire.server.app",
        "quire.server.launch",
        "quire.server.frontends.parent",
        "quire.server.frontends.member",
        "quire.server.offline.llm",
        "quire.cli.chat",
        "quire.cli.bench.main",
    ],
)
def test_light_modules_load_no_torch(module):
    code = (
        f"import importlib, sys; importlib.import_module({module!r}); print(*sorted(m for m in sys.modules if "
        "m.partition('.')[0] in ('torch', 'transformers')))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_public_names():
    import quire

    assert quire.__all__ == ["LLM", "SamplingParams"]
    with pytest.raises(AttributeError):
        quire.Engine  # noqa: B018


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md", "docs/deployment.md"])
def test_documents_name_files_that_exist(document):
    named = re.findall(
        r"`((?:configs|server|engine|worker|tests|tools|benchmarks)/[\w/.]*)`",
        (ROOT / document).read_text(encoding="utf-8"),
    )
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_architecture_document_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = re.findall(r"`((?:engine|server|worker)/\w+/)`", text)
    missing = [path.relative_to(ROOT).as_posix() for path in MODULES.values() if path.name != "__init__.py"]
    assert not [
        path
        for path in missing
        if f"`{path}`" not in text and not path.startswith(tuple(folders)) and not path.endswith("/messages.py")
    ]
