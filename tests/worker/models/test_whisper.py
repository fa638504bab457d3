"""Whisper gives transformers' embeddings and greedy tokens, for several requests at once, after preemption, and with
timestamps.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.numpy import save_file

from quire.engine.messages import MediaItem, SamplingParams
from quire.worker.messages import SpeechRules
from quire.worker.models.audio.whisper import WhisperEncoder
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.weights.loader import load_weights
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.speech_models import build_whisper, token_id
from tests.helpers.worker.towers import close, load_tower
from tests.worker.cuda.test_cuda_graph import Recorder

POSITIONS, LENGTH = 60, 24
BLOCKS = -(-POSITIONS // 16)  # of the keys and values of the encoder's output


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    return build_whisper(folder, POSITIONS), folder


@pytest.fixture(scope="module")
def engine(built):
    engine = InProcessEngine(str(built[1]), dtype="float32", max_num_seqs=4, speculative_config=None)
    yield engine
    engine.close()


def features(seed: int) -> torch.Tensor:
    return torch.randn(80, 2 * POSITIONS, generator=torch.Generator().manual_seed(seed))


def audio(folder: Path, seed: int) -> list[MediaItem]:
    path = folder / f"{seed}.features"
    if not path.exists():
        save_file({"input_features": features(seed).numpy()}, path)
    return [MediaItem(f"key-{seed}", 0, 1, POSITIONS, str(path))]


def prompt(model, task: str = "transcribe") -> list[int]:
    return [token_id(model, name) for name in ("startoftranscript", "en", task, "notimestamps")]


def greedy(model, **fields) -> SamplingParams:
    settings = model.generation_config
    rules = SpeechRules(
        tuple(settings.suppress_tokens), tuple(settings.begin_suppress_tokens), end=settings.eos_token_id
    )
    eos = [settings.eos_token_id]
    rules = msgspec.structs.replace(rules, **fields)
    return SamplingParams(max_tokens=LENGTH, temperature=0.0, eos_token_ids=eos, speech=rules)


def expected(model, seeds: list[int], **options) -> list[list[int]]:
    found = []
    for seed in seeds:
        out = model.generate(
            features(seed)[None], language="en", task="transcribe", max_new_tokens=LENGTH, num_beams=1, **options
        )
        found.append(out[0].tolist())
    return found


def ends_with(result, reference: list[int], end: int) -> bool:
    """transformers' result may lack the prompt, and the token that ends it."""
    tokens = result.token_ids[:-1] if result.token_ids[-1:] == [end] else result.token_ids
    reference = reference[:-1] if reference[-1:] == [end] else reference
    return bool(tokens) and reference[-len(tokens) :] == tokens


def test_embeddings(built):
    model, folder = built
    with torch.inference_mode():
        mels = [features(seed) for seed in (1, 2)]
        reference = model.model.encoder(torch.stack(mels)).last_hidden_state
        tower = load_tower(WhisperEncoder, str(folder))
        close(tower.encode([{"input_features": mel} for mel in mels]), list(reference))


def test_embeddings_in_int8(built):
    """`--quantization int8` is for the encoder, too."""
    spec = read_model_spec(str(built[1]))
    found = []
    for quantization in (None, "int8"):
        model = build_model(spec, torch.bfloat16, torch.device("cpu"), quantization=quantization)
        load_weights(model, spec, str(built[1]))
        model.finalize()
        with torch.inference_mode():
            found.append(model.vision.encode([{"input_features": features(1)}])[0])
    plain, rounded = found
    assert 0 < (rounded - plain).float().norm() / plain.float().norm() < 0.05


def test_several_requests_at_once(built, engine):
    model, folder = built
    seeds = [1, 2, 3, 4, 5, 6]  # more than rows
    results = engine.generate([prompt(model)] * 6, greedy(model), media=[audio(folder, seed) for seed in seeds])
    assert [result.error for result in results] == [None] * 6
    references = expected(model, seeds)
    assert len({tuple(reference) for reference in references}) > 3, "the audio makes no difference"
    for result, reference in zip(results, references):
        assert ends_with(result, reference, token_id(model, "endofspeech"))


def test_decode_steps_are_recorded(built, engine):
    """Replayed steps read the keys and values of each request's own audio."""
    model, folder = built
    seeds = [1, 2, 3, 4, 5]
    prompts, media = [prompt(model)] * len(seeds), [audio(folder, seed) for seed in seeds]
    want = [result.token_ids for result in engine.generate(prompts, greedy(model), media=media)]
    recorded = InProcessEngine(str(folder), dtype="float32", max_num_seqs=4, speculative_config=None)
    runner = recorded.executor._worker.runner
    recorder = Recorder(runner.model)
    runner.use_graphs(recorded.scheduler.max_model_len, recorder)
    runner.forward.forward = recorder.forward
    while runner.work_idle():
        pass
    recorder.num_replays = 0
    got = [result.token_ids for result in recorded.generate(prompts, greedy(model), media=media)]
    recorded.close()
    assert got == want and recorder.num_replays > 10


def test_equal_prompts_share_no_blocks(built, engine):
    """A prompt of several blocks that was computed for other audio is no prefix hit."""
    model, folder = built
    long = [token_id(model, "startofprev"), *range(20, 80), *prompt(model)]
    alone = [engine.generate([long], greedy(model), media=[audio(folder, seed)])[0] for seed in (1, 2)]
    assert alone[0].token_ids != alone[1].token_ids
    again = engine.generate([long] * 2, greedy(model), media=[audio(folder, seed) for seed in (2, 1)])
    assert [one.token_ids for one in again] == [one.token_ids for one in reversed(alone)]
    assert [one.num_cached_tokens for one in [*alone, *again]] == [0] * 4


def test_prompt_in_chunks(built):
    model, folder = built
    long = [token_id(model, "startofprev"), *range(20, 80), *prompt(model)]
    texts = []
    for most in (64, 7):
        engine = InProcessEngine(
            str(folder), dtype="float32", max_num_seqs=4, max_num_batched_tokens=most, speculative_config=None
        )
        try:
            results = engine.generate([long] * 3, greedy(model), media=[audio(folder, seed) for seed in (1, 2, 3)])
            texts.append([result.token_ids for result in results])
        finally:
            engine.close()
    assert texts[0] == texts[1]


def test_preemption(built):
    """With too few blocks for all requests, some are computed again, and write their keys and values again."""
    model, folder = built
    params = msgspec.structs.replace(greedy(model), max_tokens=60, ignore_eos=True)
    media = [audio(folder, seed) for seed in (1, 2, 3)]
    texts, num_preemptions = [], []
    for blocks in (200, 3 * BLOCKS + 6):  # of the three, one does not find room for its output
        engine = InProcessEngine(
            str(folder), dtype="float32", max_num_seqs=4, num_gpu_blocks_override=blocks, speculative_config=None
        )
        try:
            results = engine.generate([prompt(model)] * 3, params, media=media)
            texts.append([result.token_ids for result in results])
            num_preemptions.append(sum(result.num_preemptions for result in results))
        finally:
            engine.close()
    assert texts[0] == texts[1]
    assert num_preemptions[0] == 0 < num_preemptions[1]


def test_resubmission_goes_on(built, engine):
    model, folder = built
    media = [audio(folder, 4)]
    whole = engine.generate([prompt(model)], greedy(model), media=media)[0].token_ids
    rest = engine.generate([prompt(model)], greedy(model), outputs=[whole[:9]], media=media)[0].token_ids
    assert whole[:9] + rest == whole


@pytest.mark.slow
@pytest.mark.parametrize("max_first", [50, 3])
def test_timestamps(built, engine, max_first):
    model, folder = built
    model.generation_config.max_initial_timestamp_index = max_first
    seeds = list(range(1, 9))
    begin = token_id(model, "notimestamps") + 1
    suppress = (*model.generation_config.suppress_tokens, begin - 1)
    params = greedy(model, suppress=suppress, timestamp_begin=begin, max_first=max_first)
    results = engine.generate([prompt(model)[:-1]] * 8, params, media=[audio(folder, seed) for seed in seeds])
    assert any(sum(token >= begin for token in result.token_ids) > 2 for result in results)
    references = []
    for seed in seeds:
        out = model.generate(
            features(seed)[None],
            language="en",
            task="transcribe",
            max_new_tokens=LENGTH,
            return_timestamps=True,
            return_segments=False,
            return_dict_in_generate=False,
            force_unique_generate_call=True,
        )
        references.append(out[0].tolist())
    for result, reference in zip(results, references):
        assert ends_with(result, reference, token_id(model, "endofspeech")), (result.token_ids, reference)


def test_audio_that_cannot_be_read_fails_alone(built, engine):
    model, folder = built
    lost = [MediaItem("lost", 0, 1, POSITIONS, str(folder / "lost.features"))]
    results = engine.generate([prompt(model)] * 2, greedy(model), media=[audio(folder, 1), lost])
    assert results[0].error is None and "the audio: it cannot be read" in results[1].error


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (MediaItem("k", 0, 1, 9, ""), "the audio has 9 embeddings, but 60 at token 0 are expected"),
        (MediaItem("k", 1, 1, POSITIONS, ""), "but 60 at token 0"),
    ],
)
def test_refused_by_the_scheduler(built, engine, item, message):
    with pytest.raises(ValueError, match=message):
        engine.generate([prompt(built[0])], greedy(built[0]), media=[[item]])


def test_tensors_without_biases_of_keys(built):
    """A checkpoint has none, so the loader must not miss them."""
    names = built[0].state_dict()
    assert "model.decoder.layers.0.encoder_attn.v_proj.bias" in names
    assert "model.decoder.layers.0.encoder_attn.k_proj.bias" not in names


@pytest.mark.slow
def test_two_ranks(built, engine):
    """The encoder is whole on each rank, and cross-attention is divided by heads."""
    model, folder = built
    asked = [prompt(model)] * 2, greedy(model)
    media = [audio(folder, seed) for seed in (1, 2)]
    alone = engine.generate(*asked, media=media)
    divided = InProcessEngine(
        str(folder), dtype="float32", max_num_seqs=4, tensor_parallel_size=2, speculative_config=None
    )
    try:
        found = divided.generate(*asked, media=media)
    finally:
        divided.close()
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]


@pytest.mark.slow
def test_pipeline_stages_are_refused(built):
    with pytest.raises(ValueError, match="--pipeline-parallel-size must be 1 for WhisperForCausalLM, whose layers all"):
        InProcessEngine(str(built[1]), pipeline_parallel_size=2)
