"""Models that read images through the engine: tokens and log-probabilities equal transformers'."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.engine.messages import AddRequest, SamplingParams
from quire.worker import estimates
from quire.worker.cpu import build as native_build
from quire.worker.messages import most_blocks
from quire.worker.models.registry import read_model_spec
from quire.worker.spec.cache import plan_cache
from quire.worker.spec.model import cache_specs
from tests.helpers.in_process import InProcessEngine, Result
from tests.helpers.models.image_prompts import Prompt, Reference, Writer, build, picture
from tests.helpers.models.judges import judge

pytestmark = pytest.mark.slow

NAMES = ["llava", "pixtral", "mistral3", "internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4-large"]
NAMES += ["glm4v", "glm4v_moe", "glm_ocr", "granite4_vision", "granite_docling", "lfm3_vl", "lighton_ocr"]
NAMES += ["mistral_large4", "qianfan_ocr", "aya_vision", "cohere2_vision", "llava_next", "kimi_k25"]
NAMES += ["minicpmv4_6", "minicpmv4_6-4x", "qwen4_exp", "inkling", "inkling2"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0)
SMALL = {"block_size": 4, "max_model_len": "400", "max_num_seqs": 8}
CHUNKS = {"gemma4-large": 80}  # tokens of a step, fewer than some images have unless they are computed whole


def workload(write: Writer, seed: int = 0) -> list[Prompt]:
    """Text, one image and several, at the start, next to each other, and one image in two prompts."""
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(30, 250) for _ in range(length)]

    a, b, c = picture(0, 40, 30), picture(1, 25, 61), picture(2, 90, 31)
    return [
        write(*text(33)),
        write(*text(5), a, *text(7)),
        write(b, *text(3)),
        write(*text(9), a, *text(2), c, *text(4), b, *text(11)),
        write(*text(3), c, 31, c, *text(20)),
        write(*text(2)),
        write(*text(8), b),
    ]


def check(name: str, model: Any, prompts: list[Prompt], results: list[Result]) -> None:
    for prompt, result in zip(prompts, results):
        assert result.error is None and len(result.token_ids) == GREEDY.max_tokens
        logprobs = [entry.logprobs[0] for entry in result.logprobs]
        reference = Reference(name, model, prompt.images)
        wrong, error = judge(reference, prompt.token_ids, result.token_ids, logprobs)
        limit = 1e-3 if error < 1e-3 else max(1e-3, 4 * reference.rounding(prompt.token_ids + result.token_ids))
        assert (wrong, error < limit) == (0, True), f"{len(prompt.images)} images: {wrong} wrong, error {error}"


def run(folder: Path, prompts: list[Prompt], **settings: Any) -> list[Result]:
    engine = InProcessEngine(str(folder), **SMALL | settings)
    results = generate(engine, prompts)
    engine.close()
    return results


def tight_engine(name: str, folder: Path, prompts: list[Prompt], **settings: Any) -> InProcessEngine:
    """Its blocks hold little more than the longest request, and its steps fewer tokens than some images have."""
    longest, chunk = max(len(prompt.token_ids) for prompt in prompts) + GREEDY.max_tokens, CHUNKS.get(name, 26)
    num_blocks = most_blocks(plan_cache(cache_specs(read_model_spec(str(folder)), 4)).groups, longest, 4, chunk) + 1
    tight = {"num_gpu_blocks_override": num_blocks, "max_model_len": str(longest), "max_num_batched_tokens": chunk}
    return InProcessEngine(str(folder), **SMALL | tight | settings)


def generate(engine: InProcessEngine, prompts: list[Prompt], sampling: SamplingParams = GREEDY) -> list[Result]:
    return engine.generate([one.token_ids for one in prompts], sampling, media=[one.media for one in prompts])


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_logprobs_equal_transformers(name, tmp_path):
    """Also in chunks that cut images, after preemption, and with prefix hits that end in images and after them."""
    model = build(name, tmp_path)
    write = Writer(tmp_path, tmp_path)
    prompts = workload(write)
    check(name, model, prompts, run(tmp_path, prompts))
    prompts = workload(write, 1) + prompts
    engine = tight_engine(name, tmp_path, prompts, steps_in_flight=2)
    first = generate(engine, prompts)
    again = generate(engine, prompts[::-1])[::-1]
    generate(engine, prompts[-1:])
    last = generate(engine, prompts[-1:])  # ends with an image
    engine.close()
    if name != "lfm3_vl":  # its requests wait for states instead
        assert sum(result.num_preemptions for result in first) > 0, "the pool was not small enough"
    item = prompts[-1].media[0]
    inside = item.offset < last[0].num_cached_tokens < item.offset + item.length
    if item.offset + item.length == len(prompts[-1].token_ids):  # no text of the image's own follows
        assert inside != engine.ready.media.whole
    for results in (first, again):
        check(name, model, prompts, results)
    check(name, model, prompts[-1:], last)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "gemma3", "gemma4-large", "pixtral", "internvl", "llava"])
def test_bfloat16(name, tmp_path, _kernels_in_the_cache):
    """The native kernels give about the reference's log-probabilities and, with `deterministic`, the same bits alone
    and among others, in one chunk and in several.
    """
    if native_build.cpu_level() is None or native_build.compiler() is None:
        pytest.skip("no native kernels here")
    model = build(name, tmp_path, "bfloat16")
    prompts = workload(Writer(tmp_path, tmp_path))
    wide = name.startswith(("qwen3", "gemma"))  # heads as wide as the native attention needs
    engine = tight_engine(name, tmp_path, prompts, dtype="bfloat16", deterministic=wide)
    crowd = generate(engine, prompts)
    assert engine.executor._worker.runner.platform.ops.name == "native"
    engine.close()
    for prompt, result in zip(prompts, crowd):
        assert result.error is None
        logprobs = [entry.logprobs[0] for entry in result.logprobs]
        wrong, error = judge(Reference(name, model, prompt.images), prompt.token_ids, result.token_ids, logprobs, 0.6)
        assert (wrong, error < 0.5) == (0, True), f"{len(prompt.images)} images: {wrong} wrong, error {error}"
    if wide:
        settings = {"dtype": "bfloat16", "deterministic": True, "enable_prefix_caching": False}
        engine = InProcessEngine(str(tmp_path), **SMALL | settings)
        alone = [generate(engine, [prompt])[0] for prompt in prompts]
        engine.close()
        assert [one.logprobs for one in alone] == [one.logprobs for one in crowd]


@pytest.fixture
def qwen(tmp_path) -> tuple[Any, Writer]:
    return build("qwen3_vl", tmp_path), Writer(tmp_path, tmp_path)


def test_choices_of_one_prompt(qwen, tmp_path):
    """n > 1: the choices share the prompt and its images, and each is what it would be alone."""
    _, write = qwen
    prompts = workload(write)[1:4]
    sampling = msgspec.structs.replace(GREEDY, temperature=1.0, seed=5)
    engine = InProcessEngine(str(tmp_path), **SMALL)
    encoded = count_encoded(engine)
    arguments = {"media": [prompt.media for prompt in prompts]}
    together = engine.generate([prompt.token_ids for prompt in prompts], sampling, n=3, **arguments)
    assert len(encoded) == len({item.key for prompt in prompts for item in prompt.media})
    for k in range(3):
        seeded = msgspec.structs.replace(sampling, seed=5 + k)
        alone = engine.generate([prompt.token_ids for prompt in prompts], seeded, **arguments)
        assert [one.token_ids for one in alone] == [one.token_ids for one in together[k::3]]
    assert together[0].token_ids != together[1].token_ids
    engine.close()


def count_encoded(engine: InProcessEngine) -> list[int]:
    """A list that gets the number of embeddings of every image that is encoded from now on."""
    tower, sizes = engine.executor._worker.runner.images.encoder.tower, []
    encode = tower.encode

    def counting(images):
        found = encode(images)
        sizes.extend(map(len, found))
        return found

    tower.encode = counting
    return sizes


def test_images_of_equal_size_never_share_blocks(qwen, tmp_path):
    """Their token ids are equal; the images, their answers and the blocks from the image on are not."""
    model, write = qwen
    first, second = (write(*range(40, 50), picture(seed, 40, 30), 51, 52) for seed in (0, 1))
    assert first.token_ids == second.token_ids and first.media[0].key != second.media[0].key
    engine = InProcessEngine(str(tmp_path), **SMALL)
    one = generate(engine, [first])
    two = generate(engine, [second])
    again = generate(engine, [first])
    engine.close()
    assert two[0].num_cached_tokens == 8 and again[0].num_cached_tokens > 20  # the blocks before the image, and all
    check("qwen3_vl", model, [first, second, first], [*one, *two, *again])
    assert one[0].token_ids != two[0].token_ids


def test_embeddings_that_make_room_are_computed_again(qwen, tmp_path, monkeypatch):
    """With room for little more than the largest image, every image is encoded again and again."""
    model, write = qwen
    monkeypatch.setattr(estimates, "_LARGEST_IMAGE", 1)
    prompts = workload(write) + workload(write, 1)
    engine = tight_engine("qwen3_vl", tmp_path, prompts, enable_prefix_caching=False)
    assert engine.ready.media.cache_size == engine.ready.media.encoder_budget == 26
    encoded, kept = count_encoded(engine), engine.executor._worker.runner.images.encoder.embeddings
    execute = engine.executor.execute

    def watched(step):
        pending = execute(step)
        pending.result()
        assert sum(map(len, kept.values())) <= 26
        return pending

    engine.executor.execute = watched
    check("qwen3_vl", model, prompts, generate(engine, prompts))
    engine.close()
    assert len(encoded) > len({item.key for prompt in prompts for item in prompt.media})


@pytest.mark.parametrize("depth", [1, 2])
def test_an_image_that_cannot_be_encoded_fails_its_requests_alone(qwen, tmp_path, depth):
    model, write = qwen
    good = workload(write)
    missing, garbage, other = (write(40, picture(seed, 40, 30), 41) for seed in (10, 11, 12))
    paths = [Path(prompt.media[0].path) for prompt in (missing, garbage, other)]
    kept = paths[0].read_bytes()
    paths[0].unlink()
    paths[1].write_bytes(b"no tensors")
    paths[2].write_bytes(Path(good[2].media[0].path).read_bytes())  # features of another size
    engine = InProcessEngine(str(tmp_path), steps_in_flight=depth, **SMALL | {"max_num_seqs": 16})
    results = generate(engine, [good[0], missing, good[1], garbage, good[2], other, *good[3:]])
    bad = [results.pop(i) for i in (5, 3, 1)][::-1]
    assert [one.finish_reason for one in bad] == ["error"] * 3
    assert all("image 1 of the prompt: it cannot be" in one.error for one in bad)
    assert "cannot be read" in bad[0].error and "24 embeddings, but it has 20 tokens" in bad[2].error
    check("qwen3_vl", model, good, results)
    paths[0].write_bytes(kept)  # the image is not remembered as unreadable
    check("qwen3_vl", model, [missing, *good[:2]], generate(engine, [missing, *good[:2]]))
    engine.close()


def test_a_request_that_is_aborted_within_an_image(qwen, tmp_path):
    model, write = qwen
    prompts = workload(write)
    engine = tight_engine("qwen3_vl", tmp_path, prompts)
    scheduler = engine.scheduler
    scheduler.add(AddRequest("gone", prompts[3].token_ids, GREEDY, media=prompts[3].media))
    step = scheduler.schedule()
    item = prompts[3].media[0]
    assert item.offset < step.input.num_scheduled[0] < item.offset + item.length
    pending = engine.executor.execute(step.input)
    scheduler.abort(["gone"])
    assert not scheduler.update(step, pending.result())
    check("qwen3_vl", model, prompts, generate(engine, prompts))
    engine.close()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3_vl", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "steps_in_flight": 4}),
        ("gemma3", {"pipeline_parallel_size": 2}),
        ("glm_ocr", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "steps_in_flight": 4}),
        ("lfm3_vl", {"tensor_parallel_size": 2}),
        ("granite4_vision", {"tensor_parallel_size": 2}),
        ("granite_docling", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("mistral_large4", {"tensor_parallel_size": 2}),
        ("kimi_k25", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ],
    ids=["tp2-pp2", "pp2", "glm", "lfm3", "granite", "docling", "large4", "kimi"],
)
def test_several_ranks(name, settings, tmp_path):
    """The first stage encodes; the last one knows what failed there."""
    model, write = build(name, tmp_path), Writer(tmp_path, tmp_path)
    prompts = workload(write)
    bad = write(40, picture(10, 40, 30), 41)
    Path(bad.media[0].path).unlink()
    engine = tight_engine(name, tmp_path, prompts, num_threads=1, debug_check_ranks=True, **settings)
    try:
        *results, failed = generate(engine, [*prompts, bad])
        assert failed.finish_reason == "error" and "image 1 of the prompt" in failed.error
        check(name, model, prompts, results)
    finally:
        engine.close()
