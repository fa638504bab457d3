"""Reading adapters in PEFT's format: what is computed, and what is refused by name."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from quire.checkpoints import lora
from quire.checkpoints.lora_files import content_hash
from quire.configs.config import Config
from quire.server.lora.snapshots import Snapshots
from quire.server.startup.engine_group import EngineGroup
from quire.worker.lora.reading import open_matrices
from tests.helpers.models.lora import write_adapter

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
MODULE = "model.layers.0.self_attn.q_proj"


def tensors(rank=4, module=MODULE, dtype=torch.float32):
    prefix = f"base_model.model.{module}"
    return {
        f"{prefix}.lora_A.weight": torch.ones(rank, 16, dtype=dtype),
        f"{prefix}.lora_B.weight": torch.ones(32, rank, dtype=dtype),
    }


def read(tmp_path, config=None, weights=None):
    write_adapter(tmp_path, CONFIG | (config or {}), tensors() if weights is None else weights)
    return lora.read_lora(tmp_path)


@pytest.mark.parametrize(
    ("config", "rank", "scale"),
    [
        ({}, 4, 2.0),
        ({"use_rslora": True}, 4, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 4, 0.5),
        ({"alpha_pattern": {"k_proj": 2, r"layers\.0\..*": 16}}, 4, 4.0),
        ({"rank_pattern": {"self_attn.q_proj": 2}}, 2, 4.0),
        ({"target_modules": "all-linear"}, 4, 2.0),
        ({"target_modules": r"model\.layers\.\d+\.self_attn\.(q|k)_proj"}, 4, 2.0),
        ({"target_modules": ["self_attn.q_proj"]}, 4, 2.0),
        ({"target_modules": [MODULE]}, 4, 2.0),
        ({"modules_to_save": None, "use_dora": False, "bias": "none", "init_lora_weights": True}, 4, 2.0),
    ],
)
def test_ranks_scales_and_targets(config, rank, scale, tmp_path):
    found = read(tmp_path, config, tensors(rank))
    assert (found.rank, found.modules[MODULE].scale) == (rank, scale)
    assert (found.modules[MODULE].in_features, found.modules[MODULE].out_features) == (16, 32)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora: DoRA"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"], "alpha_pattern": {"x": 2}}, "target_parameters with"),
        ({"target_parameters": "mlp.experts.gate_up_proj"}, "target_parameters must be a list"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' changes"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"r": 513}, "r is 513, but must be a whole number from 1 to 512"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
        ({"rank_pattern": {"(": 2}}, "no regular expression"),
        ({"target_modules": ["k_proj"]}, "which target_modules of adapter_config.json does not name"),
        ({"exclude_modules": ["q_proj"]}, "does not name"),
        ({"r": 8}, "have shapes [4, 16] and [32, 4], but rank 8"),
    ],
)
def test_settings_that_are_refused(config, reason, tmp_path):
    with pytest.raises(ValueError) as error:
        read(tmp_path, config)
    assert reason in str(error.value) and str(tmp_path) not in str(error.value)


def test_tensors_that_are_refused(tmp_path):
    one = f"base_model.model.{MODULE}"
    for added, reason in (
        ({f"{one}.lora_magnitude_vector.weight": torch.ones(32)}, "DoRA"),
        ({f"{one}.lora_B.bias": torch.ones(32)}, "biases are not supported"),
        ({"base_model.model.lm_head.weight": torch.ones(8, 16)}, "modules_to_save"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 8)}, "matrices of embeddings"),
        ({"base_model.model.model.layers.1.q_proj.lora_A.weight": torch.ones(4, 8)}, "not the other of lora_A"),
    ):
        with pytest.raises(ValueError, match=reason):
            read(tmp_path, {}, tensors() | added)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for value in (float("nan"), float("inf")):
            broken = tensors(dtype=dtype)
            broken[f"{one}.lora_B.weight"][3, 1] = value
            found = read(tmp_path, {}, broken)
            with (
                open_matrices(found) as read_matrix,
                pytest.raises(ValueError, match=r"lora_B.weight. has a weight that is infinite or not a number"),
            ):
                read_matrix(found.modules[MODULE].b, None)
    with pytest.raises(ValueError, match="type F64"):
        read(tmp_path, {}, tensors(dtype=torch.float64))


def test_files_that_are_missing_or_damaged(tmp_path):
    with pytest.raises(ValueError, match=r"there is no adapter_config.json"):
        lora.read_lora(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"no adapter_model.safetensors \(adapter_model.bin cannot be read"):
        lora.read_lora(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="incomplete or damaged") as error:
        lora.read_lora(tmp_path)
    assert str(tmp_path) not in str(error.value)
    (tmp_path / "adapter_config.json").write_text("[")
    with pytest.raises(ValueError, match="is not JSON"):
        lora.read_lora(tmp_path)


@pytest.fixture
def paths(tmp_path):
    """Path -> the reason why it is no adapter."""
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    os.symlink("nowhere", tmp_path / "link")
    os.symlink("circle", tmp_path / "circle")
    for folder, names in (("empty", ()), ("two", ("a.gguf", "b.gguf")), ("other", ("a.gguf",))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("x")
    missing = "the path does not exist: give the folder of a PEFT adapter, or a GGUF adapter"
    neither, empty = "the path is neither a folder nor a GGUF file", "there is no adapter_config.json: give the folder"
    reasons = {"missing": missing, "file/x": missing, "link": missing, "file": neither, "pipe": neither, "empty": empty}
    reasons |= {"x" * 300: "the path cannot be read: File name too long"}
    reasons |= {"circle": "the path cannot be read: Too many levels of symbolic links"}
    reasons |= {"two": "more than one GGUF file (a.gguf, b.gguf): give one", "other": "a.gguf is no GGUF file"}
    return {tmp_path / name: reason for name, reason in reasons.items()}


def test_paths_that_are_no_adapter(paths):
    """At the start, where the path is told, and for a client, who is not told it."""
    snapshots = Snapshots()
    for path, reason in paths.items():
        for read_path in (lora.read_lora, snapshots.take):
            with pytest.raises(ValueError) as error:
                read_path(path)
            assert reason in str(error.value) and str(path.parent) not in str(error.value)
        with pytest.raises(ValueError, match="--lora-modules sql: ") as error:
            lora.check_modules([f"sql={path}"])
        assert reason in str(error.value) and str(path) in str(error.value)
    snapshots.close()


@pytest.mark.parametrize("inner", ["", "inner"])
def test_folders_without_permission(tmp_path, monkeypatch, inner):
    """The reason of the system, whether the folder itself or one above it cannot be read. Root reads all: it is told
    that it may not.
    """
    folder = tmp_path / "closed"
    (folder / inner).mkdir(parents=True)

    def refuse(path, *args, **kwargs):
        if str(path).startswith(str(folder)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    name = "stat" if inner else "listdir"
    real = getattr(os, name)
    monkeypatch.setattr(os, name, refuse)
    for read_path in (lora.read_lora, Snapshots().take):
        with pytest.raises(ValueError, match=r"^the path cannot be read: Permission denied$"):
            read_path(folder / inner)
    monkeypatch.undo()
    monkeypatch.setattr(Path, "iterdir", lambda self: refuse(self))
    with pytest.raises(ValueError, match=r"--lora-dir: cannot read .*closed: permission denied"):
        lora.folders_at_start([], str(folder))
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--lora-dir: cannot read .*file: Not a directory"):
        lora.folders_at_start([], str(tmp_path / "file"))


def test_a_missing_adapter_is_refused_before_any_process(paths, tmp_path):
    group = EngineGroup(Config.from_flat(model=str(tmp_path), lora_modules=[f"sql={tmp_path / 'missing'}"]))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--lora-modules sql: the path does not exist"):
        group.start(str(tmp_path))
    assert not group.processes


def test_the_hash_is_of_the_contents(tmp_path):
    for name, alpha in (("a", 8), ("b", 8), ("c", 9)):
        write_adapter(tmp_path / name, CONFIG | {"lora_alpha": alpha}, tensors())
    a, b, c = (content_hash(tmp_path / name) for name in "abc")
    assert a == b != c


def test_settings_of_the_command_line(tmp_path):
    assert lora.parse_module("sql=/a=b") == ("sql", "/a=b", None)
    assert lora.parse_module('{"name": "n", "path": "/p", "base_model_name": "m"}') == ("n", "/p", "m")
    for wrong in ("x", "=p", "n=", "{", '{"name": "n"}', '{"name": "n", "path": "p", "rank": 3}'):
        with pytest.raises(ValueError, match="--lora-modules"):
            lora.parse_module(wrong)
    with pytest.raises(ValueError, match="given twice"):
        lora.folders_at_start(["a=b", "a=c"], None)
    with pytest.raises(ValueError, match="--lora-dir: there is no folder"):
        lora.folders_at_start([], str(tmp_path / "x"))
    write_adapter(tmp_path / "z", CONFIG | {"r": 128}, tensors(128))
    (tmp_path / "file").write_text("")
    assert [(name, given) for name, _, given in lora.folders_at_start(["b=x"], str(tmp_path))] == [
        ("b", True), ("z", False)
    ]  # fmt: skip
    assert lora.max_rank(None, [], str(tmp_path)) == 128 and lora.max_rank(None, [], None) == 64


GGUF = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
WEIGHT = "blk.0.attn_q.weight"


def write_gguf(path, metadata=None, tensors=None, arch="llama"):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (GGUF | (metadata or {})).items():
        if value is not None:
            writer.add_float32(key, value) if isinstance(value, float) else writer.add_string(key, value)
    if tensors is None:
        tensors = {f"{WEIGHT}.lora_a": torch.ones(4, 16), f"{WEIGHT}.lora_b": torch.ones(32, 4)}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_adapters(tmp_path):
    """A file, or a folder with one; the scale is alpha / rank, 1 if there is no alpha."""
    file = write_gguf(tmp_path / "some.gguf")
    for path in (file, tmp_path):
        found = lora.read_lora(path)
        assert found.rank == 4 and found.modules[MODULE].scale == 2.0 and found.modules[MODULE].swapped
    write_gguf(file, {"adapter.lora.alpha": None})
    assert lora.read_lora(file).modules[MODULE].scale == 1.0
    assert [(name, given) for name, _, given in lora.folders_at_start([f"x={file}"], str(tmp_path))] == [
        ("x", True), ("some", False)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "tensors", "arch", "reason"),
    [
        ({"general.type": "model"}, None, "llama", "general.type is 'model'"),
        ({"adapter.type": "other"}, None, "llama", "adapter.type is 'other'"),
        ({}, None, "unknown", "general.architecture is 'unknown'"),
        ({}, {}, "llama", "has no tensors"),
        ({}, {f"{WEIGHT}.lora_a": torch.ones(4, 16)}, "llama", "not the other of lora_a and lora_b"),
        ({}, {f"{WEIGHT}.x": torch.ones(4, 16)}, "llama", "the tensor 'blk.0.attn_q.weight.x'"),
        ({}, {f"{WEIGHT}.lora_a": torch.ones(4, 16), f"{WEIGHT}.lora_b": torch.ones(32, 5)}, "llama", "have shapes"),
        (
            {}, {f"output.weight.lora_{side}": torch.ones(4, 4) for side in "ab"}, "llama",
            "matrices for output.weight, which is not supported",
        ),
    ],
)  # fmt: skip
def test_gguf_adapters_that_are_refused(metadata, tensors, arch, reason, tmp_path):
    file = write_gguf(tmp_path / "one.gguf", metadata, tensors, arch)
    with pytest.raises(ValueError) as error:
        lora.read_lora(file)
    assert reason in str(error.value) and str(tmp_path) not in str(error.value)
