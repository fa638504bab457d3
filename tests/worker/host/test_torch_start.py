"""torch without the modules that steps do not use: who needs them later gets them, as if they had been there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
# Imports torch once and runs each line of stdin in a fork of that state; prints what it evaluates to.
_RUN_EACH = """
import os, sys
from quire.engine.executor.base import import_executor
import_executor("uniproc")
import torch
from torch import nn
late = "torch._refs", "torch._decomp", "torch.ao.quantization", "torch.fx.node", "torch.utils.data.dataloader", "sympy"
early = {name for name in late if name in sys.modules}
print(repr(early), flush=True)
for line in eval(sys.argv[1]):
    if os.fork() == 0:
        *statements, value = line.split("; ")
        exec("; ".join(statements))
        print(repr(eval(value)), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, line
"""
_COMPLETE = "from quire.worker.host import torch_start as t; t.complete(); "
_EIGENVALUES = "list(torch.linalg.eigh(torch.ones(3, 3, device='meta'))[0].shape)"
_USES = {
    "torch.compile(lambda x: x + 1, backend='eager', fullgraph=True)(torch.ones(2)).tolist()": [2.0, 2.0],
    "torch.vmap(torch.sum)(torch.ones(2, 3)).tolist()": [3.0, 3.0],
    "from torch.func import grad; grad(lambda x: x * x)(torch.tensor(3.0)).item()": 6.0,
    "from torch._subclasses import FakeTensorMode as F; F().from_tensor(torch.ones(2, 3)).mT.tolist is not None": True,
    "torch.randperm(3, generator=torch.Generator().manual_seed(3)).sort()[0].tolist()": [0, 1, 2],
    "import copy, pickle; pickle.loads(pickle.dumps(copy.deepcopy(torch.ones(2)))).tolist()": [1.0, 1.0],
    "x = torch.ones(2, requires_grad=True); (x * x).sum().backward(); x.grad.tolist()": [2.0, 2.0],
    "torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8).dequantize().tolist()": [1.0, 1.0],
    "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).size(0)": 2,
    "torch.ones(2, 2).to_sparse().to_dense().tolist()": [[1.0, 1.0], [1.0, 1.0]],
    "torch.distributions.Normal(0.0, 1.0).mean.item()": 0.0,
    "from torch.profiler import profile; p = profile(); p.start(); torch.ones(2); p.stop(); True": True,
    "torch.jit.script(nn.ReLU())(torch.ones(2)).tolist()": [1.0, 1.0],
    f"{_COMPLETE}{_EIGENVALUES}": [3],
    f"import transformers.modeling_utils; {_EIGENVALUES}": [3],
    "from torch.utils.data import TensorDataset; len(TensorDataset(torch.ones(3)))": 3,
    "from torch.fx.node import Node; import torch.fx; Node is torch.fx.Node": True,
    "from unittest.case import SkipTest; import unittest; SkipTest is unittest.SkipTest": True,
    "from unittest import mock; type(mock).__name__": "_Placeholder",  # torch 2.11 has this import
    "from torch.distributions.normal import Normal as N; N is torch.distributions.Normal": True,
    "from torch.fx import symbolic_trace; len(symbolic_trace(nn.ReLU()).graph.nodes)": 3,
    "from torch.library import Library; Library('a_test', 'DEF').define('f(Tensor x) -> Tensor')": "f",
    "import torchgen.model; str(torchgen.model.FunctionSchema.parse('f(Tensor x) -> Tensor').name)": "f",
    "import unittest; unittest.TestCase().id()": "unittest.case.TestCase.runTest",
    "callable(torch.hub.load)": True,
    "from torch.nn.quantized import Linear; Linear.__module__": "torch.ao.nn.quantized.modules.linear",
    f"{_COMPLETE}from torch._higher_order_ops import cond; [torch.cond is cond, torch.vmap is torch.func.vmap]": [
        True,
        True,
    ],
    f"{_COMPLETE}[n for n in t.POSTPONED if type(sys.modules[n]).__name__ != 'module']": [],
}


def test_modules_that_are_postponed_come_when_they_are_needed() -> None:
    run = [sys.executable, "-W", "ignore", "-c", _RUN_EACH, json.dumps(list(_USES))]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    early, *results = [eval(line) for line in ended.stdout.splitlines()]
    assert early == set(), "postponed modules are imported at the start"
    assert dict(zip(_USES, results, strict=True)) == _USES


_TWO_THREADS = """
import sys, threading
from quire.worker.host import torch_start
torch_start.postpone()
import torch
first = threading.Thread(target=lambda: torch.vmap(torch.sum)(torch.ones(2, 3)))
first.start()
while "torch.distributions.bernoulli" not in sys.modules:
    pass
assert first.is_alive(), "the modules are complete"
assert torch.distributions.Normal(0.0, 1.0).mean.item() == 0.0
import torch.fx.experimental.proxy_tensor
first.join()
"""


def test_a_second_thread_waits_for_what_the_first_imports() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _TWO_THREADS], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr


def test_a_torch_that_is_imported_already_stays_whole() -> None:
    code = "import sys, torch; from quire.worker.host import torch_start as t; t.postpone(); t.complete()"
    check = "assert all(type(sys.modules[n]).__name__ == 'module' for n in t.POSTPONED)"
    ended = subprocess.run([sys.executable, "-c", f"{code}; {check}"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
