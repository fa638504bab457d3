"""The diffs of docs/add-a-*.md apply to this tree, and what they add works."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.server.parsers import registry as parsers
from quire.server.structured.structure import Structure
from tests.server.parsers.answers import TOOLS, add_up, events_of, parser
from tests.server.structured.walk import walk

ROOT = Path(__file__).parent.parent.parent
TEXT = list(range(4, 40))


def apply(page: str, folder: Path) -> Path:
    """The files that the diff in `page` changes, as it leaves them, below `folder`."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for name in re.findall(r"^--- a/(.+)$", diff, re.MULTILINE):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(["git", "apply", "-"], input=diff, cwd=folder, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    lint = [sys.executable, "-m", "ruff", "check", "--quiet", "--config", str(ROOT / "pyproject.toml")]
    lint += [str(path) for path in folder.iterdir() if path.name != "tests"]
    linted = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout
    return folder


@pytest.fixture
def load(monkeypatch):
    """Loads a file as a module; `name` makes it importable."""

    def load(path: Path, name: str):
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def logits(folder: Path):
    """The logits of a text, by this tree's classes and the changed ones, in float32 and plain torch."""
    import torch

    from quire.worker.models.registry import build_model, read_model_spec
    from quire.worker.weights.loader import load_weights
    from tests.helpers.worker.dense_attention import PagedRunner

    spec = read_model_spec(str(folder))
    model = build_model(spec, torch.float32, torch.device("cpu"))
    load_weights(model, spec, str(folder))
    with torch.inference_mode():
        return model.logits(PagedRunner(model, 1, len(TEXT)).step({0: TEXT})[0])


@pytest.mark.slow
def test_a_model_family(load, monkeypatch, tmp_path):
    import torch

    from quire.worker.models import registry
    from tests.helpers.models.judges import load_family

    root = apply("add-a-model-family.md", tmp_path)
    assert "HeliumForCausalLM" not in registry.MODELS
    load(root / "worker/models/helium.py", "quire.worker.models.helium")
    monkeypatch.setattr(registry, "MODELS", load(root / "worker/models/registry.py", "changed_registry").MODELS)
    families = load(root / "tests/helpers/models/families.py", "changed_families")
    folder = families.build_family("helium", tmp_path / "model", num_hidden_layers=2)
    assert registry.read_model_spec(folder).implementation != "transformers"
    with torch.inference_mode():
        expected = load_family(folder)(torch.tensor([TEXT])).logits[0]
    assert (logits(Path(folder)) - expected).abs().max() < 1e-3


def test_a_tool_format(load, monkeypatch, tmp_path):
    root = apply("add-a-tool-format.md", tmp_path)
    load(root / "server/parsers/tools/internlm.py", "quire.server.parsers.tools.internlm")
    changed = load(root / "server/parsers/registry.py", "changed_parsers")
    monkeypatch.setattr(parsers, "TOOL_FORMATS", changed.TOOL_FORMATS)
    samples = load(root / "tests/server/parsers/samples.py", "changed_samples").SAMPLES["internlm"]
    calls = [add_up(events_of(parser("internlm", "think"), sample)).calls for sample in samples]
    assert [(call.name, json.loads(call.arguments)) for (call,) in calls] == [
        ("get_weather", {"city": "Paris"}),
        ("now", {}),
    ]
    chosen = load(root / "tests/server/parsers/test_registry.py", "changed_choices").SHORT
    for template, (name, _) in chosen.items():
        found, _ = parsers.choose_tools(template, lambda token: False)
        assert (found and found.name) == name
    tag = parsers.tool_format("internlm").structure(TOOLS, required=True, parallel=False)
    texts = [walk(Structure(kind="structural_tag", value=tag), seed) for seed in range(6)]
    assert any(ended for _, ended in texts)
    for text in (text.decode() for text, ended in texts if ended):
        (call,) = add_up(events_of(parser("internlm", "think"), text)).calls
        assert call.name in ("get_weather", "now") and json.loads(call.arguments) is not None


def test_a_weight_format(load, monkeypatch, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    from quire.worker.layers.quantization import checkpoint
    from quire.worker.layers.quantization.stored import Piece
    from tests.helpers.models.checkpoints import build_checkpoint

    root = apply("add-a-weight-format.md", tmp_path)
    bitnet = load(root / "worker/layers/quantization/bitnet.py", "quire.worker.layers.quantization.bitnet")
    changed = load(root / "worker/layers/quantization/checkpoint.py", "changed_formats")
    monkeypatch.setattr(checkpoint, "FORMATS", changed.FORMATS)

    def packed(ternary: torch.Tensor) -> torch.Tensor:
        quarters = (ternary + 1).to(torch.uint8).chunk(4)
        return sum(quarter << 2 * i for i, quarter in enumerate(quarters))

    plain = Path(build_checkpoint("llama3", tmp_path / "plain", num_hidden_layers=1))
    stored = Path(shutil.copytree(plain, tmp_path / "stored"))
    tensors = load_file(plain / "model.safetensors")
    small = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = 1 / tensors[name].abs().mean()
        ternary = (tensors[name] * scale).round().clamp(-1, 1)
        tensors[name] = ternary / scale
        small |= {name: packed(ternary), f"{name}_scale": scale[None]}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(small, stored / "model.safetensors", {"format": "pt"})
    config = json.loads((stored / "config.json").read_text()) | {"quantization_config": {"quant_method": "bitnet"}}
    (stored / "config.json").write_text(json.dumps(config))
    assert (logits(stored) - logits(plain)).abs().max() < 1e-4
    # a rank's slice
    weight = torch.randint(-1, 2, (16, 6), generator=torch.Generator().manual_seed(1)).float()
    piece = Piece("w", (16, 6), (4, 8), (2, 3), 0)
    slices = {"values": packed(weight)[:, 2:5], "scale": torch.tensor([2.0])}
    assert torch.equal(bitnet.Ternary().decode(piece, slices).dequantized(), weight[4:12, 2:5] / 2)
