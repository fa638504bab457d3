"""Encoders, classifiers and token classifiers that quire has no file for, against transformers alone."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.configs.config import Config
from quire.engine.messages import AddRequest
from quire.worker.cpu.device import CpuPlatform
from quire.worker.limits import Limits, check_settings, resolve_limits
from quire.worker.messages import PoolingParams, SamplingParams
from quire.worker.models.fallback_whole import UNBOUNDED
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.transformer.pooling import read_pooling
from quire.worker.weights.loader import load_weights
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.checkpoints import VOCAB_SIZE
from tests.worker.transformer.test_pooling import pooled

_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
    "bos_token_id": 3,
    "eos_token_id": 2,
}
_DECODING = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
# class of transformers -> settings
EMBEDDERS = {
    "ElectraModel": {},
    "DebertaV2Model": _RELATIVE,  # attention by relative positions
    "XLNetModel": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "max_position_embeddings": None},
    "T5EncoderModel": _T5,
    "MPNetModel": {},  # positions relative, and after the padding token
    "EuroBertModel": {"num_key_value_heads": 4},
    "BigBirdModel": {"block_size": 4, "num_random_blocks": 1},  # sparse attention of more than 28 tokens
}
CLASSIFIERS = {
    "DebertaV2ForSequenceClassification": _RELATIVE,
    "AlbertForSequenceClassification": {},
    "DistilBertForSequenceClassification": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "CamembertForSequenceClassification": {},
    "MegatronBertForSequenceClassification": {},
    "SqueezeBertForSequenceClassification": {},
    "BartForSequenceClassification": _DECODING | {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "StableLmForSequenceClassification": {"num_key_value_heads": 2},
    "BertForSequenceClassification": {},  # which has a file of its own, too
}
_FUNNEL = {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_head": 8, "n_head": 4, "num_hidden_layers": None}
_AXIAL = {"axial_pos_shape": [8, 10], "axial_pos_embds_dim": [8, 24], "attn_layers": ["local", "local"]}
_REFORMER = _AXIAL | {"attention_head_size": 8, "local_attn_chunk_length": 5, "feed_forward_size": 48}
REFUSED = {"FunnelModel": _FUNNEL | {"d_model": 32}, "ReformerModel": _REFORMER}
TOKEN_CLASSIFIERS = {
    "ElectraForTokenClassification": {},
    "GPT2ForTokenClassification": {},
    "ConvBertForTokenClassification": {},  # convolutions beside attention
    "RoFormerForTokenClassification": {},
    "LayoutLMForTokenClassification": {},  # texts without boxes
    "UMT5ForTokenClassification": _T5,
}
OTHERS = {"MptForSequenceClassification": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 48}}
# the token to which the family's tokenizer gives a type of its own
CLASS_TOKENS = {"XLNetModel": -1}
PROMPTS = [[4 + (7 * i + n) % 200 for i in range(n)] + [2] for n in (3, 40, 1, 17, 3)]


def build(architecture: str, folder, **changes) -> str:
    import transformers

    settings = (EMBEDDERS | CLASSIFIERS | TOKEN_CLASSIFIERS | REFUSED | OTHERS)[architecture]
    cls = getattr(transformers, architecture)
    given = {key: value for key, value in (_SMALL | settings | changes).items() if value is not None}
    torch.manual_seed(5)
    model = cls(cls.config_class(**given)).eval()
    for parameter in model.parameters():  # biases and norms, too, which are 0 and 1 in a new model
        parameter.data += torch.randn_like(parameter) / 10
    model.save_pretrained(folder)
    return str(folder)


def reference(architecture: str, folder: str, field: str) -> list[torch.Tensor]:
    """transformers' outputs for each prompt alone."""
    import transformers

    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    found = []
    for prompt in PROMPTS:
        given = {"input_ids": torch.tensor([prompt])}
        if (place := CLASS_TOKENS.get(architecture)) is not None:
            given["token_type_ids"] = torch.zeros_like(given["input_ids"])
            given["token_type_ids"][0, place] = 2
        with torch.inference_mode():
            found.append(copy.deepcopy(model)(**given)[field][0])  # BigBird's changes with the first short prompt
    return found


def engine_for(folder: str, **options) -> InProcessEngine:
    settings = {"dtype": "float32", "model_impl": "transformers", "max_model_len": "64"}
    return InProcessEngine(folder, **(settings | options))


def load(folder: str) -> torch.nn.Module:
    spec = read_model_spec(folder)
    model = build_model(spec, torch.float32, torch.device("cpu"))
    load_weights(model, spec, folder)
    return model


@pytest.mark.parametrize("architecture", EMBEDDERS)
def test_embeddings(architecture, tmp_path):
    """The mean of all tokens, in steps of several prompts."""
    engine = engine_for(folder := build(architecture, tmp_path))
    expected = torch.stack([one.mean(0) for one in reference(architecture, folder, "last_hidden_state")])
    torch.testing.assert_close(pooled(engine, PROMPTS), expected, rtol=1e-5, atol=1e-5)
    assert engine.ready.pooling.whole_prompts and not engine.ready.pooling.generates


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_classifiers(architecture, tmp_path):
    engine = engine_for(folder := build(architecture, tmp_path, num_labels=3))
    expected = torch.stack(reference(architecture, folder, "logits"))
    torch.testing.assert_close(pooled(engine, PROMPTS, task="classify"), expected, rtol=1e-5, atol=1e-5)
    assert engine.ready.pooling.tasks == ["classify"]


@pytest.mark.parametrize("architecture", TOKEN_CLASSIFIERS)
def test_token_classifiers(architecture, tmp_path):
    engine = engine_for(folder := build(architecture, tmp_path, num_labels=3))
    for i, prompt in enumerate(PROMPTS):
        pooling = PoolingParams("token_classify")
        engine.scheduler.add(AddRequest(str(i), prompt, SamplingParams(max_tokens=0), pooling=pooling))
    found = {}
    while step := engine.scheduler.schedule():
        for output in engine.scheduler.update(step, engine.executor.execute(step.input).result()).get(b"", []):
            found[int(output.request_id)] = torch.frombuffer(bytearray(output.pooled), dtype=torch.float32)
    for i, expected in enumerate(reference(architecture, folder, "logits")):
        torch.testing.assert_close(found[i].view(-1, 3), expected, rtol=1e-5, atol=1e-5)
    assert engine.ready.pooling.tasks == ["token_classify"]


def test_second_texts_have_a_type_of_their_own(tmp_path):
    """As in the file that quire has for the family."""
    folder, given = build("BertForSequenceClassification", tmp_path, num_labels=1), {"task": "classify"}
    plain, *_, pair = (pooled(engine_for(folder), PROMPTS[:1], **given | more) for more in ({}, {"second_start": 2}))
    own = pooled(InProcessEngine(folder, dtype="float32"), PROMPTS[:1], **given, second_start=2)
    torch.testing.assert_close(pair, own, rtol=1e-5, atol=1e-5)
    assert (plain - pair).abs().max() > 1e-3


def test_the_longest_prompt_of_an_encoder_decoder_without_an_end(tmp_path):
    """The classifier reads an end-of-text token, which takes the place of the last one."""
    import transformers

    folder = build("BartForSequenceClassification", tmp_path, num_labels=3)
    engine = InProcessEngine(folder, dtype="float32", model_impl="transformers")
    prompt = [4 + i % 50 for i in range(engine.ready.max_model_len)]
    assert len(prompt) == _SMALL["max_position_embeddings"]
    model = transformers.BartForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[*prompt[:-1], 2]])).logits
    torch.testing.assert_close(pooled(engine, [prompt], task="classify"), expected, rtol=1e-5, atol=1e-5)


def test_a_token_classifier_reads_no_end(tmp_path):
    """Of an encoder-decoder's encoder, whose prompt has no end-of-text token."""
    import transformers

    folder = build("UMT5ForTokenClassification", tmp_path, num_labels=3)
    model = load(folder)
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        expected = transformers.UMT5ForTokenClassification.from_pretrained(folder).eval()(input_ids=ids).logits[0]
        torch.testing.assert_close(model._pass(ids, None), expected, rtol=1e-5, atol=1e-5)


def test_an_error_of_a_prompt_fails_its_request_alone(tmp_path):
    """Longer prompts than MPT's table of positions, which config.json no longer tells."""
    folder = build("MptForSequenceClassification", tmp_path, num_labels=3, max_position_embeddings=None)
    assert read_model_spec(folder).max_model_len == 48
    engine = engine_for(folder, max_model_len="48")
    model = engine.executor._worker.runner.model
    expected = pooled(engine, PROMPTS[:1], task="classify")
    model.inner.config.max_seq_len = 30
    params = [PoolingParams("classify")] * 2
    found = engine.generate(PROMPTS[:2], SamplingParams(max_tokens=0), pooling=params)
    assert found[0].error is None and "for this prompt of 41 tokens" in found[1].error
    torch.testing.assert_close(pooled(engine, PROMPTS[:1], task="classify"), expected)

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    model.inner.forward = out_of_memory
    (found,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=0), pooling=params[:1])
    assert found.error.startswith("the device is out of memory")  # the engine halves a step before it fails a request


def test_reading_config_json_leaves_no_device_behind(tmp_path):
    folder = build("ElectraModel", tmp_path)
    with ThreadPoolExecutor(1) as pool:  # a thread that no other test has left one on
        pool.submit(read_model_spec, folder, "transformers").result()
        assert pool.submit(torch._C._len_torch_function_stack).result() == 0


def test_positions_begin_after_that_of_the_padding_token(tmp_path):
    folder = build("CamembertForSequenceClassification", tmp_path)
    assert read_model_spec(folder).max_model_len == _SMALL["max_position_embeddings"] - 2


def resolved(folder: str, **settings) -> Limits:
    config = Config.from_flat(model=folder, device="cpu", **settings)
    return resolve_limits(config, read_model_spec(folder), CpuPlatform())


def test_a_step_is_bounded_where_positions_are_not(tmp_path):
    """A prompt has one step, whose buffers are made at the start."""
    folder = build("T5EncoderModel", tmp_path, max_position_embeddings=None)
    assert read_model_spec(folder).max_model_len == UNBOUNDED
    limits = resolved(folder)
    assert limits.max_model_len == limits.max_num_batched_tokens == 8192
    (choice,) = [choice for choice in limits.choices if choice[0] == "max_model_len"]
    assert choice[1] == "8192" and str(UNBOUNDED) in choice[2]
    limits = resolved(folder, max_model_len="20000")
    assert limits.max_model_len == limits.max_num_batched_tokens == 20000
    assert resolved(folder, max_num_batched_tokens=30000).max_model_len == 30000


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_several_ranks_are_refused_before_sizes_are_divided(name, tmp_path):
    folder = build("AlbertForSequenceClassification", tmp_path)
    config = Config.from_flat(model=folder, device="cpu", **{f"{name}_parallel_size": 2})
    with pytest.raises(
        ValueError, match=rf"--{name}-parallel-size 2 does not work with models that transformers .*AlbertForSeq"
    ):
        check_settings(config, read_model_spec(folder))


def test_damaged_pooling_settings_are_named(tmp_path):
    folder = build("AlbertForSequenceClassification", tmp_path)
    (tmp_path / "modules.json").write_text('[{"idx": 0}]')
    with pytest.raises(ValueError, match=r"cannot read .*modules\.json: KeyError: 'type'"):
        read_pooling(folder, read_model_spec(folder))


def test_what_does_not_work_is_refused(tmp_path):
    folder = build("AlbertForSequenceClassification", tmp_path / "albert")
    with pytest.raises(ValueError, match="--pooling mean does not work with AlbertForSequenceClassification"):
        engine_for(folder, pooling="mean")
    with pytest.raises(ValueError, match="--quantization does not work with AlbertForSequenceClassification"):
        build_model(read_model_spec(folder), torch.float32, torch.device("cpu"), quantization="int8")
    folder = build("FunnelModel", tmp_path / "funnel")
    with pytest.raises(
        ValueError, match=r"FunnelModel cannot run with transformers: its code fails for a text of . tok"
    ):
        engine_for(folder)
    folder = build("ReformerModel", tmp_path / "reformer")
    with pytest.raises(ValueError, match=r"its code makes numbers of the shape \[1, 64\] .* not \[1, 32\]"):
        engine_for(folder)
    folder = build("ElectraModel", tmp_path / "electra")
    path = tmp_path / "electra" / "config.json"
    path.write_text(path.read_text().replace("ElectraModel", "ElectraForTokenClassification"))
    with pytest.raises(ValueError, match=r"tensors are missing in .*: classifier\.bias"):
        load(folder)
