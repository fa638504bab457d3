"""Pictures through the whole of quire: message, template, processor, shared memory, engine process, worker, text."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.cli import main as cli
from quire.server.offline.llm import LLM
from quire.server.offline.params import RequestOutput, SamplingParams
from tests.helpers.models import deepseek_ocr_reading as reading
from tests.helpers.models import seeing_models
from tests.helpers.models.image_prompts import picture
from tests.helpers.models.judges import judge
from tests.server.media.test_llava_processors import transformers_class

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
BOS = 3  # <|begin_of_text|>, which this tokenizer does not add by itself
PICTURES = [picture(0, 40, 30), picture(1, 25, 61), picture(2, 90, 31)]


def check(model: Any, output: RequestOutput) -> None:
    (answer,) = output.outputs
    assert len(answer.token_ids) == GREEDY.max_tokens
    logprobs = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
    wrong, error = judge(model, output.prompt_token_ids, answer.token_ids, logprobs)
    assert (wrong, error < 1e-3) == (0, True), f"{wrong} wrong, error {error}"


def message(*parts: Any) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_pil", "image_pil": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def test_qwen(tmp_path, capsys):
    model = seeing_models.write_qwen(tmp_path)
    a, b, c = PICTURES
    cases = [[a, "what?"], ["no picture"], ["first ", b, " and ", c, " differ?"], [a, "what?"]]
    with LLM(str(tmp_path), max_model_len=300, device="cpu", max_num_batched_tokens=64) as llm:
        outputs = llm.chat([message(*case) for case in cases], GREEDY, use_tqdm=False)
        again = llm.chat(message(*cases[2]), GREEDY, use_tqdm=False)[0]
    sizes = {"shortest_edge": 64, "longest_edge": 64 * 40}
    theirs = transformers_class("qwen2_vl", "image_processing_pil", "Qwen2VLImageProcessorPil")
    processor = theirs(patch_size=4, size=sizes)
    for case, output in zip(cases, outputs, strict=True):
        pictures = [part for part in case if not isinstance(part, str)]
        inputs = {name: torch.as_tensor(v) for name, v in processor(pictures).items()} if pictures else {}

        def reference(ids: torch.Tensor, inputs: dict[str, Any] = inputs) -> Any:
            kinds = {"mm_token_type_ids": (ids == seeing_models.IMAGE_PAD).int()} if inputs else {}
            return model(ids, use_cache=False, **inputs, **kinds)

        check(reference, output)
        assert (seeing_models.IMAGE_PAD in output.prompt_token_ids) == bool(pictures)
    assert outputs[0].outputs[0].token_ids == outputs[3].outputs[0].token_ids
    assert again.outputs[0].token_ids == outputs[2].outputs[0].token_ids and again.num_cached_tokens > 0
    assert cli.main(["check", str(tmp_path), "--device", "cpu", "--log-level", "error"]) == 0
    assert "images: at most 32 per prompt; mm_processor_kwargs: detail, max_pixels" in capsys.readouterr().out


def test_deepseek_ocr(tmp_path, capsys):
    """As vLLM's users call it: the placeholder in the prompt, no chat template, no remote code, the n-gram guard."""
    tensors = seeing_models.write_deepseek_ocr(tmp_path)
    modes = {"base_size": 128, "image_size": 64}
    prompt = {"prompt": "<image>\nFree OCR.", "multi_modal_data": {"image": PICTURES[2]}, "mm_processor_kwargs": modes}
    with LLM(str(tmp_path), max_model_len=200, device="cpu") as llm:
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        chat = llm.chat(message(PICTURES[2], "Free OCR."), GREEDY, use_tqdm=False, mm_processor_kwargs=modes)[0]
        guard = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args={"ngram_size": 2})
        (guarded,) = llm.generate(prompt, guard, use_tqdm=False)
    processed = reading_page(tmp_path, modes)
    check(lambda ids: SimpleNamespace(logits=reading.logits(tensors, ids[0].tolist(), [processed])[None]), output)
    assert chat.prompt_token_ids == [BOS, *output.prompt_token_ids]
    ids = guarded.outputs[0].token_ids
    assert cli.main(["check", str(tmp_path), "--device", "cpu", "--log-level", "error"]) == 0
    assert "chat template: none: a conversation is the contents of its messages" in capsys.readouterr().out
    assert len(set(itertools.pairwise(ids))) == len(ids) - 1, "a pair of tokens is repeated"


def reading_page(folder: Any, modes: dict[str, Any]) -> reading.Tensors:
    from quire.server.media.registry import load_processor

    (page,) = load_processor(folder)([PICTURES[2]], modes)
    assert "pixel_values_local" in page.features
    return {name: torch.from_numpy(values) for name, values in page.features.items()}
