"""Tests the dependency rules of docs/architecture.md: walks the imports of every file and starts the light modules in a
separate process.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from setuptools import find_packages

from quire.server.state import ServerState

ROOT = Path(__file__).parent.parent
FOLDERS = ("checkpoints", "cli", "configs", "engine", "server", "worker")  # each is the package quire.<folder>
PACKAGES = tuple(f"quire.{folder}" for folder in FOLDERS)
MAX_LINE, MAX_FILE, MAX_MODULES = 120, 600, 20
SUFFIXES = {".py", ".h", ".cpp", ".cu"}
# Process-wide by nature: the ambient process groups, and a library that cannot be unloaded.
SINGLETONS = {
    ("quire.worker.parallel", "_tp"),
    ("quire.worker.parallel", "_pp"),
    ("quire.worker.parallel", "_ep"),
    ("quire.worker.cpu.native", "KERNELS"),
}


@dataclass(frozen=True)
class Import:
    module: str  # the importing file as a module: "quire.engine.scheduler"
    target: str  # the imported module: "quire.worker.messages"
    line: int
    at_start: bool  # when the module is imported: not inside a function or under TYPE_CHECKING

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def modules() -> dict[str, Path]:
    found = {"quire": ROOT / "quire" / "__init__.py", "quire.__main__": ROOT / "quire" / "__main__.py"}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[f"quire.{name}"] = path
    return found


def imports(module: str, tree: ast.AST, packages: set[str], at_start: bool = True) -> Iterator[Import]:
    """Every import below `tree`; `from package import module` names the module."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            continue
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
NEEDS = {name for name in MODULES if name.endswith(".needs")}  # protocols: the parts of the server that a folder uses


@functools.cache  # not when tests are collected, which every process does
def trees() -> dict[str, ast.Module]:
    gc.disable()  # no tree has a cycle, and walking millions of nodes takes longer than parsing
    try:
        return {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def all_imports() -> list[Import]:
    return [found for module, tree in trees().items() for found in imports(module, tree, set(MODULES))]


def within(module: str, *prefixes: str) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def select(*sources: str, of: tuple[str, ...] = ("quire",)) -> list[Import]:
    """Imports in modules under `sources` of modules under `of`."""
    return [found for found in all_imports() if within(found.module, *sources) and within(found.target, *of)]


def outside(package: str, *allowed: str) -> list[str]:
    """Imports of quire modules in `package` from outside itself and `allowed`."""
    return [str(found) for found in select(package) if not within(found.target, package, *allowed)]


def test_the_walk_sees_the_project():
    assert {"quire.engine.messages", "quire.worker.messages", "quire.configs.config", "quire"} <= set(MODULES)
    assert any(
        found.module == "quire.engine.messages" and found.target == "quire.worker.messages" for found in all_imports()
    )


# ---- which package may import which


def test_configs_is_a_leaf():
    assert not outside("quire.configs")


def test_checkpoints_is_a_leaf():
    assert not outside("quire.checkpoints")


def test_the_worker_knows_the_leaves_only():
    assert not outside("quire.worker", "quire.configs", "quire.checkpoints")


def test_the_engine_knows_the_workers_messages_only():
    wrong = outside("quire.engine", "quire.configs", "quire.worker.messages")
    executors = [text for text in wrong if text.startswith("quire.engine.executor.")]  # executors start the worker
    assert wrong == executors
    starts = (" imports quire.worker.worker", " imports quire.worker.host.torch_start")
    assert all(any(one in text for one in starts) for text in executors)


def test_the_server_knows_the_engines_messages_only():
    assert not [
        str(found)
        for found in select("quire.server")
        if not within(found.target, "quire.server", "quire.configs", "quire.checkpoints", "quire.engine.messages")
        and found.target != "quire"
    ]


def test_nothing_imports_the_command_line():
    below = ("quire.checkpoints", "quire.configs", "quire.engine", "quire.server", "quire.worker")
    assert not [str(found) for found in select(*below, of=("quire.cli",))]


def test_no_import_circles():
    """Imports within functions and for type checkers count: a circle that starts well is a circle all the same."""
    assert_no_circle({module: module for module in MODULES})


@pytest.mark.parametrize("folder", ["checkpoints", "cli", "engine", "server", "worker"])
def test_no_circles_between_rooms(folder):
    """A room is a subfolder or a single file of `folder`. Rooms have an order in which each imports earlier ones."""
    inside = [module for module in MODULES if within(module, f"quire.{folder}") and module.count(".") > 1]
    assert_no_circle({module: ".".join(module.split(".")[:3]) for module in inside})


def assert_no_circle(room: dict[str, str]) -> None:
    """Assert that the rooms of the modules in `room` import each other in one direction."""
    graph: dict[str, set[str]] = {name: set() for name in room.values()}
    for found in all_imports():
        if found.module in room and found.target in room and room[found.module] != room[found.target]:
            graph[room[found.module]].add(room[found.target])
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in graph[module]:
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


# ---- inside the server


def test_generation_knows_no_dialect_and_dialects_not_each_other():
    assert not [str(found) for found in select("quire.server.generate", of=("quire.server.api",))]
    dialects = {path.parent.name for path in (ROOT / "server/api").glob("*/__init__.py")}
    for dialect in dialects:
        others = tuple(f"quire.server.api.{other}" for other in dialects - {dialect})
        assert not [str(found) for found in select(f"quire.server.api.{dialect}", of=others)]


def test_the_server_is_passed_as_the_parts_that_are_used():
    """Only its composition knows `ServerState`; a parameter of another type has each attribute that is used of it."""
    frontends = ("frontend", "http_side", "served_model")
    composition = {"quire.server.app", "quire.server.offline.runtime", "quire.server.models.host"}
    composition |= {"quire.server.models.loaded", *(f"quire.server.frontends.{name}" for name in frontends)}
    users = {found.module for found in select("quire", of=("quire.server.state",))}
    assert users <= composition, "type it with protocols of the folder's needs.py"
    missing = []
    for module, path in ((name, path) for name, path in MODULES.items() if within(name, "quire.server", "quire.cli")):
        tree = trees()[module]
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for argument in (one for one in function.args.args if one.arg == "state"):
                if (cls := _protocol(module, argument.annotation)) is not None:
                    used = {node.attr for node in ast.walk(function) if _is_attribute_of(node, "state")}
                    missing += [f"{path}:{function.lineno}: {name}" for name in sorted(used - members(cls))]
    assert not missing


def _is_attribute_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name


def _protocol(module: str, annotation: ast.expr | None) -> type | None:
    """Return the protocol that types a parameter, if a `needs.py` or the module itself defines it."""
    if isinstance(annotation, ast.Attribute) and ast.unparse(annotation).startswith("needs."):
        needs = next(found.target for found in all_imports() if found.module == module and found.target in NEEDS)
        return getattr(importlib.import_module(needs), annotation.attr)
    found = isinstance(annotation, ast.Name) and getattr(importlib.import_module(module), annotation.id, None)
    bases = found.__mro__[1:] if isinstance(found, type) else ()
    return found if {base.__module__ for base in bases} & NEEDS else None


def members(cls: type) -> set[str]:
    """Attributes and methods that a protocol requires."""
    return {name for base in cls.__mro__ for name in (*vars(base), *vars(base).get("__annotations__", ()))}


def test_the_server_has_every_part():
    has = members(ServerState)
    found = [one for name in sorted(NEEDS) for one in vars(importlib.import_module(name)).values()]
    parts = [one for one in found if isinstance(one, type) and one.__module__ in NEEDS]
    assert parts and not [f"{one.__name__}.{name}" for one in parts for name in members(one) - has if name[0] != "_"]


def test_parsers_know_only_text():
    assert not outside("quire.server.parsers", "quire.server.values")


def test_any_is_json():
    """Parameters and fields of the server that may be anything are `Json` (server/values.py); else `object` will do."""
    # values of templates, and nodes of the parser of `re`
    others = {"quire.server.text.template_sandbox", "quire.server.structured.schema.escaped_pattern"}
    found = []
    for module in (name for name in MODULES if within(name, "quire.server") and name not in others):
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
            annotation = getattr(node, "annotation", None)
            if isinstance(annotation, ast.Name) and annotation.id == "Any":
                found.append(f"{module}:{node.lineno}")
    assert not found


@pytest.mark.parametrize("name", ["torch", "transformers", "numpy"])
def test_the_server_and_the_contracts_load_no_tensors(name):
    torch_free = "quire.checkpoints", "quire.configs", "quire.server", "quire.engine.messages", "quire.worker.messages"
    found = [found for found in select(*torch_free, of=(name,)) if not _fallback(found) and not _media(found)]
    assert not [str(one) for one in found]


def test_images_load_nothing_at_the_start_of_the_server():
    """numpy and Pillow are loaded by the first image, not with the server."""
    heavy = {"numpy", "PIL"}
    while True:  # what loads them, directly or through others
        users = {found.module for found in select("quire.server") if found.at_start and found.target in heavy}
        users |= {found.module for found in select("quire.server", of=("numpy", "PIL")) if found.at_start}
        if users <= heavy:
            break
        heavy |= users
    assert not [module for module in heavy - {"numpy", "PIL"} if not within(module, "quire.server.media")]


def _media(found: Import) -> bool:
    return within(found.module, "quire.server.media") and within(found.target, "numpy")


def _fallback(found: Import) -> bool:
    """transformers may serve, lazily, tokenizers that have no tokenizer.json."""
    return found.module == "quire.server.text.tokenizer" and within(found.target, "transformers") and not found.at_start


def test_transformers_is_not_on_the_start_path():
    """Only models that quire has no file for load it."""
    fallback = tuple(f"quire.worker.models.fallback{part}" for part in ("", "_spec", "_states", "_whole"))
    starting = [found for found in select("quire", of=("transformers", *fallback)) if found.at_start]
    assert not [str(found) for found in starting if not within(found.module, *fallback)]


# ---- inside the engine and the worker


def test_engine_layers():
    """core -> chores -> scheduler -> kv -> request, without upward imports; only executors may use tensors."""
    order = [f"quire.engine.{name}" for name in ("core", "chores", "scheduler", "kv", "request")]
    for height, lower in enumerate(order):
        assert not [str(found) for found in select(lower, of=tuple(order[:height]))]
    tensors = select("quire.engine", of=("torch", "numpy"))
    assert not [str(found) for found in tensors if not within(found.module, "quire.engine.executor")]


def test_worker_layers():
    """model_runner -> models, attention, sampling, batch; models -> layers; no upward imports."""
    runner = ("quire.worker.model_runner", "quire.worker.startup", "quire.worker.worker")
    assert not [str(found) for found in select("quire.worker", of=runner) if not within(found.module, *runner)]
    models = ("quire.worker.transformer.decoder",)
    assert not [str(found) for found in select("quire.worker.layers", "quire.worker.attention", of=models)]
    backends = [
        str(found)
        for found in select("quire.worker.layers", "quire.worker.models", of=("quire.worker.attention",))
        if found.target.removeprefix("quire.worker.attention.") not in ("base", "distance_bias", "scaled")
    ]
    assert not backends


def test_layers_take_the_arguments_of_a_step_in_one_object():
    """`LayerCall` or `StageCall` of worker/transformer/calls.py; models alone take them one by one."""
    fallback = "quire.worker.models.fallback.TransformersLM", "quire.worker.models.fallback_whole.TransformersWhole"
    models = {"quire.worker.transformer.decoder.CausalLM", *fallback}
    wide = []
    for module in (name for name in MODULES if within(name, "quire.worker.transformer", "quire.worker.models")):
        for cls in (node for node in ast.walk(trees()[module]) if isinstance(node, ast.ClassDef)):
            methods = (one for one in cls.body if isinstance(one, ast.FunctionDef))
            wide += [f"{module}.{cls.name}" for one in methods if one.name == "forward" and len(one.args.args) > 4]
    assert not set(wide) - models


def test_devices_are_behind_one_seam():
    """Only `worker/platform.py` selects a device; each device has its own folder."""
    for device in ("quire.worker.cpu", "quire.worker.cuda"):
        users = {found.module for found in select("quire", of=(device,)) if not within(found.module, device)}
        assert users <= {"quire.worker.platform"}, users


# ---- state, names and sizes


def test_no_module_level_state():
    """No `global` statements, and no instances of our classes that modules share by import."""
    stateful = set()
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                stateful.update((module, name) for name in node.names)
    assert stateful <= SINGLETONS, stateful - SINGLETONS
    kernels = [path for module, path in MODULES.items() if "KERNELS" in path.read_text(encoding="utf-8")]
    assert all(path.is_relative_to(ROOT / "worker" / "cpu") for path in kernels), kernels


def test_lines_have_at_most_120_columns():
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in MODULES.values()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_LINE and "noqa: E501" not in line
    ]
    assert not long


def sources() -> list[Path]:
    """Every Python and C++ file of the project."""
    folders = (*FOLDERS, "quire", "tests", "tools", "benchmarks")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]


def test_no_file_is_longer_than_one_can_keep_in_mind():
    lines = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8").count("\n") for path in sources()}
    assert not {name: num for name, num in lines.items() if num > MAX_FILE}


def test_lines_of_cpp_have_at_most_120_columns():
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources()
        if path.suffix != ".py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_LINE
    ]
    assert not long


def test_folders_have_at_most_20_modules():
    """Those of `worker/models` and its encoders are alike: one per family."""
    names = [path.parent for path in MODULES.values() if path.name != "__init__.py"]
    wide = {path.relative_to(ROOT).as_posix(): names.count(path) for path in set(names)}
    alike = "worker/models", "worker/models/vision"
    assert not {name: num for name, num in wide.items() if num > MAX_MODULES and name not in alike}


def test_no_module_is_named_like_a_third_party_package():
    assert not {path.stem for path in (ROOT / "tests").glob("*.py")} & {"tokenizers", "queue", "openai"}


LIGHT = [
    "quire.cli.main",
    "quire.configs.config",
    "quire.engine.messages",
    "quire.worker.messages",
    "quire.worker.cache.tiers.open",
    "quire.server.app",
    "quire.server.launch",
    "quire.server.frontends.parent",
    "quire.server.frontends.member",
    "quire.server.offline.llm",
    "quire.cli.chat",
    "quire.cli.bench.main",
]


def test_light_modules_load_no_torch():
    """One process imports all, and prints those after which torch is loaded."""
    code = f"""import importlib, sys
for module in {LIGHT}:
    importlib.import_module(module)
    if {{"torch", "transformers"}} & {{name.partition(".")[0] for name in sys.modules}}:
        print(module)"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_public_names():
    import quire

    assert quire.__all__ == ["LLM", "LoRARequest", "SamplingParams", "StructuredOutputsParams"]
    with pytest.raises(AttributeError):
        quire.Engine  # noqa: B018


def test_the_distribution_has_one_top_level_package():
    """Its packages are exactly the folders that have an __init__.py, all below `quire`.

    `quire/NAME` is a link to each folder at the top, which setuptools and type checkers follow.
    """
    others = {"benchmarks", "quire", "tests", "tools"}
    top = {init.parent.name for init in ROOT.glob("*/__init__.py")} - others
    assert top == set(FOLDERS)
    links = {path.name: path for path in (ROOT / "quire").iterdir() if path.is_symlink()}
    assert {name: path.readlink().as_posix() for name, path in links.items()} == {name: f"../{name}" for name in top}
    packages = {"quire"}
    for folder in FOLDERS:
        for init in (ROOT / folder).rglob("__init__.py"):
            packages.add("quire." + ".".join(init.parent.relative_to(ROOT).parts))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert set(find_packages(str(ROOT), include=settings["packages"]["find"]["include"])) == packages


@pytest.mark.parametrize(
    "document", ["README.md", "docs/how-it-works.md", "docs/architecture.md", "docs/deployment.md"]
)
def test_documents_name_files_that_exist(document):
    folders = "quire|checkpoints|cli|configs|server|engine|worker|tests|tools|benchmarks"
    named = re.findall(rf"`((?:{folders})/[\w/.]*)`", (ROOT / document).read_text(encoding="utf-8"))
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_readme_is_one_screen_and_the_index_lists_the_other_pages():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 550
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\((\w[\w-]*\.md)\)", index))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_the_architecture_document_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = re.findall(r"`((?:checkpoints|cli|configs|engine|server|worker)/[\w/]+/)`", text)
    missing = [path.relative_to(ROOT).as_posix() for path in MODULES.values() if path.name != "__init__.py"]
    assert not [
        path
        for path in missing
        if f"`{path}`" not in text
        and not path.startswith(tuple(folders))
        and not path.endswith("/messages.py")
        and not path.startswith(("cli/", "quire/"))
    ]


def test_the_list_of_models_is_current():
    from tools.models_table import FILE, page

    assert FILE.read_text(encoding="utf-8") == page(), "run: python -m tools.models_table"
