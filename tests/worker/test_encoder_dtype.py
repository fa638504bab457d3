"""`--dtype auto` computes float32 encoders in bfloat16 on CPU only where their embeddings stay almost the same."""

from __future__ import annotations

import pytest
import torch

from quire.configs.config import Config
from quire.worker import encoder_dtype
from quire.worker.cpu.device import CpuPlatform
from quire.worker.limits import resolve_limits
from quire.worker.models.registry import read_model_spec
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.embedders import TEXTS, reference_embeddings
from tests.helpers.models.encoders import build_encoder
from tests.worker.transformer.test_pooling import encode, pooled


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch, tmp_path):
    # not by QUIRE_CACHE, without whose kernels every engine would start to compile some
    monkeypatch.setattr(encoder_dtype, "cache_folder", lambda: tmp_path / "cache" / "gguf")
    monkeypatch.setattr(encoder_dtype, "MIN_BYTES", 0)
    monkeypatch.setattr(CpuPlatform, "prefers_bfloat16", lambda platform: True)


def _resolve(folder, **settings):
    config = Config.from_flat(model=folder, device="cpu", **settings)
    return resolve_limits(config, read_model_spec(folder), CpuPlatform())


@pytest.mark.slow
@pytest.mark.parametrize("name, mode", [("bert", "mean"), ("modernbert", "cls")])
def test_close_embeddings_are_computed_in_bfloat16(name, mode, tmp_path):
    folder = build_encoder(name, tmp_path / "model", mode=mode)
    engine = InProcessEngine(folder)
    (found,) = [choice for choice in engine.ready.choices if choice[0] == "dtype"]
    assert found[1] == "bfloat16" and "1 - cosine to float32's embeddings is" in found[2]
    vectors, expected = pooled(engine, encode(folder), normalize=True), reference_embeddings(folder, TEXTS)
    distances = 1 - torch.nn.functional.cosine_similarity(vectors, expected)
    assert 0 < distances.max() < encoder_dtype.MOST_DISTANCE


def test_others_stay_as_they_are(tmp_path, monkeypatch):
    folder = build_encoder("bert", tmp_path / "model", mode="mean")
    monkeypatch.setattr(encoder_dtype, "MOST_DISTANCE", 1e-9)
    limits = _resolve(folder)
    assert limits.dtype == torch.float32
    (reason,) = [reason for name, _, reason in limits.choices if name == "dtype"]
    assert "more than 1e-09" in reason
    # the distance is measured once per model
    monkeypatch.setattr(encoder_dtype, "embedding_distance", None)
    assert _resolve(folder).choices == limits.choices


def test_the_choice_is_only_for_embeddings_of_float32_under_auto(tmp_path, monkeypatch):
    monkeypatch.setattr(encoder_dtype, "embedding_distance", None)  # nothing is measured
    folder = build_encoder("bert", tmp_path / "model", mode="mean")
    assert _resolve(folder, dtype="float32").dtype == torch.float32
    assert _resolve(folder, load_format="dummy").dtype == torch.float32
    classifier = build_encoder("bert", tmp_path / "classifier", "ForSequenceClassification", num_labels=3)
    assert _resolve(classifier).dtype == torch.float32
    monkeypatch.setattr(encoder_dtype, "MIN_BYTES", 1 << 30)
    assert _resolve(folder).dtype == torch.float32
    monkeypatch.setattr(encoder_dtype, "MIN_BYTES", 0)
    monkeypatch.setattr(CpuPlatform, "prefers_bfloat16", lambda platform: False)
    assert _resolve(folder).dtype == torch.float32
