"""Models that read images: both parts are found in the files of every generation, and the encoder can be left out."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.configs.config import Config
from quire.server.startup.plan_table import plan_table
from quire.worker import estimates
from quire.worker.messages import MediaInfo
from quire.worker.models.registry import build_model, parse_model_spec, read_model_spec, weight_bytes
from quire.worker.models.vision.paddleocr_vl import PaddleOCRVLTower
from quire.worker.parallel import Group, use_groups
from quire.worker.startup.preview import preview
from quire.worker.transformer.decoder import CausalLM
from quire.worker.weights.loader import load_weights
from tests.helpers.models.llava_models import IMAGE_TOKEN_ID
from tests.helpers.models.llava_models import build_model as save_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("mistral3")
    save_model("mistral3", folder)
    return str(folder)


def load(folder: str, images: bool = True, load_format: str = "auto") -> CausalLM:
    spec = read_model_spec(folder, images=images)
    model = build_model(spec, torch.float32, CPU)
    load_weights(model, spec, folder, load_format)
    return model


def values(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def renamed(folder: str, target, change) -> str:
    tensors = load_file(f"{folder}/model.safetensors")
    save_file({change(name): tensor for name, tensor in tensors.items()}, target / "model.safetensors")
    shutil.copy(f"{folder}/config.json", target)
    return str(target)


def newer(name: str) -> str:
    """The name that files of transformers 5 and of Qwen 3-VL have for a tensor of the older layout."""
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.")
    return name.removeprefix("language_model.") if name.startswith("language_model.") else f"model.{name}"


def test_both_generations_of_names(folder, tmp_path):
    old = values(load(folder))
    new = values(load(renamed(folder, tmp_path, newer)))
    assert old.keys() == new.keys() and any(name.startswith("vision.") for name in old)
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_the_encoder_can_be_left_out(folder):
    whole, text = values(load(folder)), values(load(folder, images=False))
    assert text.keys() == {name for name in whole if not name.startswith("vision.")}
    assert all(torch.equal(text[name], whole[name]) for name in text)
    spec, bare = read_model_spec(folder), read_model_spec(folder, images=False)
    assert bare.vision is None and spec.vision.image_token_id == IMAGE_TOKEN_ID
    tower = sum(tensor.nbytes for name, tensor in whole.items() if name.startswith("vision."))
    assert weight_bytes(spec, torch.float32) == weight_bytes(bare, torch.float32) + tower


def test_a_missing_tensor_of_the_encoder_is_named(folder, tmp_path):
    tensors = load_file(f"{folder}/model.safetensors")
    name = next(name for name in tensors if name.startswith("multi_modal_projector."))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(f"{folder}/config.json", tmp_path)
    with pytest.raises(ValueError, match=f"missing: {name}.*language-model-only"):
        load(str(tmp_path))


def test_every_rank_of_the_first_stage_has_the_whole_encoder(folder):
    spec, whole, stages = read_model_spec(folder), values(load(folder, load_format="dummy")), Group()
    group = Group()
    group.size = 2
    stages.size, stages.rank = 2, 1
    with use_groups(tp=group):
        model = build_model(spec, torch.float32, CPU)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if name.startswith("vision.")}
    assert shapes == {name: tensor.shape for name, tensor in whole.items() if name.startswith("vision.")}
    with use_groups(pp=stages):
        assert build_model(spec, torch.float32, CPU).vision is None


def test_an_image_token_must_be_named():
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral"}}
    assert parse_model_spec(raw).vision is None
    raw["vision_config"] = {"model_type": "pixtral"}
    with pytest.raises(ValueError, match="image_token_id"):
        parse_model_spec(raw)
    assert parse_model_spec(raw, images=False).vision is None


@pytest.mark.parametrize("name", ["llava", "llava_onevision"])
def test_names_of_older_siglip_and_clip(name, tmp_path):
    """The files on the Hub have these encoders in a further module, with parts that are not used."""
    save_model(name, tmp_path / "saved")

    def older(name: str) -> str:
        return name.replace("vision_tower.", "vision_tower.vision_model.")

    (tmp_path / "older").mkdir()
    other = renamed(str(tmp_path / "saved"), tmp_path / "older", older)
    tensors = load_file(f"{other}/model.safetensors")
    tensors["vision_tower.vision_model.head.probe"] = torch.ones(3)
    save_file(tensors, f"{other}/model.safetensors")
    expected, found = values(load(str(tmp_path / "saved"))), values(load(other))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_memory_of_images(folder):
    """What `quire check` shows: the embeddings and the encoder's activations; its weights are whole on every rank."""
    settings = {"model": folder, "device": "cpu", "num_gpu_blocks_override": 200}
    ready = preview(Config.from_flat(**settings))
    assert ready.media == MediaInfo(IMAGE_TOKEN_ID, 2048, 256)
    assert ready.plan.images > 2048 * 32 * 4  # of embeddings alone
    assert "2,048 embeddings kept" in plan_table(ready) and "256 in a step" in plan_table(ready)
    bare = preview(Config.from_flat(language_model_only=True, **settings))
    assert bare.media is None and bare.plan.images == 0 and "embeddings" not in plan_table(bare)
    spec, text = read_model_spec(folder), read_model_spec(folder, images=False)
    alone, split = (estimates.estimate_weights(spec, torch.float32, ranks) for ranks in (1, 2))
    assert alone - split == weight_bytes(text, torch.float32) - weight_bytes(text, torch.float32) // 2


def test_text_settings_at_the_root():
    """As PaddleOCR-VL's published config.json has them, whose encoder names two frames for weights of one."""
    raw = {
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "model_type": "paddleocr_vl",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "image_token_id": 100295,
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "vision_config": {"num_hidden_layers": 1, "spatial_merge_size": 2, "temporal_patch_size": 2},
    }
    spec = parse_model_spec(raw)
    assert spec.ropes["default"].axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert (spec.num_hidden_layers, spec.vision.mrope, spec.vision.image_token_id) == (2, True, 100295)
    with torch.device("meta"):
        tower = PaddleOCRVLTower(raw)
    assert tower.patches.in_features == 3 * 14 * 14 and tower.merger.linear_2.out_features == 1024
