"""Import torch without the modules that no step on a CPU uses: those for export, tracing, quantization and
distributions are a third of the time that `import torch` takes.

`postpone()`, called before torch is imported, puts a placeholder in place of each. All of them are imported, in
torch's order, as soon as anything asks for more: an attribute of a placeholder, a module of torch that is not imported
yet (`torch._dynamo` for `torch.compile`), or the models of transformers, which are built on the meta device.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# A version of torch may lack some of them, or import one before `import torch` ends, which then imports all.
POSTPONED = frozenset(
    {
        "torch._higher_order_ops",
        "torch._higher_order_ops.invoke_subgraph",
        "torch._meta_registrations",
        "torch._native",
        "torch.ao",
        "torch.distributed._meta_registrations",
        "torch.distributions",
        "torch.export",
        "torch.func",
        "torch.fx",
        "torch.fx.operator_schemas",
        "torch.fx.traceback",
        "torch.hub",
        "torch.masked",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
        "torch.quantization",
        "torch.utils.data",
        "torchgen",
        "torchgen.model",
        "unittest",
        "unittest.mock",
    }
)
# Names that `import torch` takes from them: module -> names -> the module that takes them.
TAKEN = {
    "torch._higher_order_ops": {"cond": "torch", "while_loop": "torch"},
    "torch._higher_order_ops.invoke_subgraph": {"NestedCompileRegionOptions": "torch.compiler"},
    "torch.func": {"vmap": "torch"},
    "torch.fx.operator_schemas": {"_SCHEMA_TO_SIGNATURE_CACHE": "torch.library"},
}
_NEED_ALL = "transformers.modeling_utils"
# of `with torch.device(...)`, of any call of an operator, and of nested tensors
_NEED_NONE = frozenset({
    "torch.utils._device", "torch.fx.experimental", "torch.fx.experimental.sym_node",
    "torch.fx.experimental._constant_symnode",
})  # fmt: skip
_NOT_ATTRIBUTES = frozenset({"__path__", "__wrapped__"})  # the import system and `inspect` look for them


def postpone() -> None:
    """Make the next `import torch` of this process leave out the POSTPONED modules. Does nothing if torch is imported
    already.
    """
    if "torch" not in sys.modules and _POSTPONER not in sys.meta_path:
        sys.meta_path.insert(0, _POSTPONER)


def complete() -> None:
    """Import the postponed modules. Idempotent."""
    _POSTPONER.complete()


class _Placeholder(ModuleType):
    """A postponed module. Only names that it lacks come to `__getattr__`."""

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_ATTRIBUTES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if (submodule := f"{self.__name__}.{name}") in POSTPONED and _POSTPONER.postpones:
            return importlib.import_module(submodule)
        _POSTPONER.complete(self)
        if type(self) is _Placeholder:  # this thread executes it, and comes back in a circle of imports
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} yet")
        return getattr(self, name)


class _Postponer(MetaPathFinder, Loader):
    """Finds and loads the POSTPONED modules as placeholders until it completes them. Finds no others."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._placeholders: list[ModuleType] = []  # in the order in which torch imports them
        self._loaders: dict[str, Loader] = {}  # of modules whose execution has not begun
        self._completing = False

    @property
    def postpones(self) -> bool:
        """Return whether an import of a POSTPONED module makes a placeholder."""
        return not self._completing

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in POSTPONED and self.postpones:
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._loaders[name], spec.loader = spec.loader, self
            return spec
        if not self._lock.acquire(blocking=False):  # the import system holds a lock that the other thread needs
            return None
        try:
            return self._find_after_completion(name)
        finally:
            self._lock.release()

    def _find_after_completion(self, name: str) -> ModuleSpec | None:
        """Import the postponed modules if the module `name` needs them. Return its spec if they imported it."""
        if name in _NEED_NONE or name in sys.modules:  # the latter is a reload
            return None
        package = sys.modules.get(name.rpartition(".")[0])
        if type(package) is _Placeholder:
            self.complete(package)
        elif name == _NEED_ALL or (name.startswith("torch.") and not _is_importing_torch()):
            self.complete()
        if name in sys.modules:  # the import that looks for it would execute it again
            spec = sys.modules[name].__spec__
            spec.loader = _Imported(spec.loader)
            return spec
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # the import system makes it

    def exec_module(self, module: ModuleType) -> None:
        for name in TAKEN.get(module.__name__, ()):
            setattr(module, name, _stand_in(module, name))
        module.__class__ = _Placeholder
        self._placeholders.append(module)
        _permit_generators()

    def complete(self, first: ModuleType | None = None) -> None:
        """Import all postponed modules and pass on the names that torch took; within that, `first` before its turn."""
        with self._lock:
            if self._completing:
                if first is not None:
                    self._load(first)
                return
            self._completing = True
            for module in self._placeholders:
                self._load(module)
            for name, takers in TAKEN.items():
                for taken, taker in takers.items():
                    if taken in vars(sys.modules.get(taker, object)):
                        setattr(sys.modules[taker], taken, getattr(sys.modules[name], taken))

    def _load(self, module: ModuleType) -> None:
        loader = self._loaders.pop(module.__name__, None)
        if loader is not None:
            module.__spec__.loader = module.__loader__ = loader
            loader.exec_module(module)
            module.__class__ = ModuleType  # not before: other threads wait for names that it lacks


class _Imported(Loader):
    """Gives an import the module that was imported while it looked for the module."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = self._loader


def _permit_generators() -> None:
    """Give `torch.Generator` its metaclass, without which it refuses to be called. A postponed module imports
    `torch._prims.rng_prims`, which gives it, too.
    """
    if give := getattr(sys.modules["torch._C"], "_set_generator_metaclass", None):
        give(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)


def _is_importing_torch() -> bool:
    torch = sys.modules.get("torch")
    return torch is None or torch.__spec__._initializing


def _stand_in(module: ModuleType, name: str) -> Any:
    """Return a function that calls the real one, a class for annotations, or a cache."""
    if name.isupper():
        return {}
    if name[0].isupper():
        return type(name, (), {"__module__": module.__name__})

    def call(*args: Any, **keywords: Any) -> Any:
        _POSTPONER.complete()
        return getattr(module, name)(*args, **keywords)

    return call


_POSTPONER = _Postponer()  # one per process, like torch
