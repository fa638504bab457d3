"""Qwen3-ASR gives transformers' embeddings, in both layouts of its files, and greedy tokens."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.numpy import save_file as save_features
from safetensors.torch import load_file, save_file

from quire.engine.messages import MediaItem, SamplingParams
from quire.worker.models.audio.qwen3_asr import Qwen3ASREncoder, length_of
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.speech_models import build_qwen3_asr
from tests.helpers.worker.towers import close, load_tower

FRAMES = (30, 100, 101, 340)  # parts of a part, whole parts, and more than a window of two parts
SETTINGS = {"dtype": "float32", "max_num_seqs": 4, "speculative_config": None}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3-asr")
    return build_qwen3_asr(folder), folder


@pytest.fixture(scope="module")
def first_layout(built, tmp_path_factory):
    """The files as they were published first: all below `thinker`, and the projector in the tower."""
    folder = tmp_path_factory.mktemp("thinker")
    raw = json.loads((built[1] / "config.json").read_text())
    parts = {name: raw.pop(name) for name in ("audio_config", "text_config", "audio_token_id")}
    (folder / "config.json").write_text(json.dumps(raw | {"thinker_config": parts}))

    def name_of(name: str) -> str:
        name = name.replace("model.multi_modal_projector.linear_", "audio_tower.proj")
        name = name.replace("model.language_model.", "model.").replace("model.audio_tower", "audio_tower")
        return f"thinker.{name}"

    tensors = load_file(built[1] / "model.safetensors")
    save_file({name_of(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((built[1] / name).read_bytes())
    return folder


def mel(frames: int) -> torch.Tensor:
    return torch.randn(32, frames, generator=torch.Generator().manual_seed(frames))


def completed(frames: int) -> dict[str, torch.Tensor]:
    """transformers' inputs: the frames and zeros after them, to whole parts."""
    rest = -frames % 100
    mask = torch.ones(1, frames + rest, dtype=torch.long)
    mask[:, frames:] = 0
    return {"input_features": torch.nn.functional.pad(mel(frames), (0, rest))[None], "input_features_mask": mask}


def test_embeddings(built):
    model, folder = built
    tower = load_tower(Qwen3ASREncoder, str(folder), "model.")
    with torch.inference_mode():
        references = [model.model.get_audio_features(**completed(frames)).pooler_output for frames in FRAMES]
        close(tower.encode([{"input_features": mel(frames)} for frames in FRAMES]), references)
    assert [len(one) for one in references] == [length_of(frames, 100) for frames in FRAMES] == [4, 13, 14, 44]


def asked(model, folder) -> tuple[list[list[int]], list[list[MediaItem]]]:
    prompts, media = [], []
    for frames in FRAMES:
        path = folder / f"{frames}.features"
        save_features({"input_features": mel(frames).numpy()}, path)
        num = length_of(frames, 100)
        prompts.append([40, 41, *[model.config.audio_token_id] * num, 42, 43])
        media.append([MediaItem(f"key-{frames}", 2, num, num, str(path))])
    return prompts, media


def tokens(folder, model, **settings) -> list[list[int]]:
    engine = InProcessEngine(str(folder), **SETTINGS | settings)
    try:
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        prompts, media = asked(model, folder)
        results = engine.generate(prompts, params, media=media)
        assert [one.error for one in results] == [None] * len(FRAMES)
        return [one.token_ids for one in results]
    finally:
        engine.close()


@pytest.fixture(scope="module")
def expected(built) -> list[list[int]]:
    model, folder = built
    found = []
    for prompt, frames in zip(asked(model, folder)[0], FRAMES):
        ids = torch.tensor([prompt])
        out = model.generate(input_ids=ids, **completed(frames), max_new_tokens=12, min_new_tokens=12, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    assert len(set(map(tuple, found))) == len(FRAMES), "the audio makes no difference"
    return found


@pytest.mark.parametrize("most", [512, 16])
def test_tokens(built, expected, most):
    """Also in chunks, which end within the audio."""
    assert tokens(built[1], built[0], max_num_batched_tokens=most) == expected


def test_tokens_of_the_first_layout(built, first_layout, expected):
    assert tokens(first_layout, built[0]) == expected


@pytest.mark.slow
def test_two_ranks(built, expected):
    assert tokens(built[1], built[0], tensor_parallel_size=2) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"n_window_infer": 150}, "n_window_infer 150 must be a multiple"), ({"d_model": 6}, "d_model 6 must be even")],
)
def test_refused_sizes(settings, message):
    with pytest.raises(ValueError, match=message):
        Qwen3ASREncoder.read_spec("", {"audio_token_id": 1, "audio_config": {"encoder_attention_heads": 4} | settings})
