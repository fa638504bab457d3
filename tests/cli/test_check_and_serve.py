"""Over a table of settings, `quire check` and the start of `quire serve` agree on exit code and message.

A row names a model and flags, and words of the message with which both refuse, or None if both accept.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.models.lora import write_adapter
from tests.helpers.server.light_model import write_light_model
from tests.helpers.server.start_in_process import Errors, run, starts_in_process

_STATES = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_WINDOW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 256}
_BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "num_key_value_heads": None,
    "head_dim": None,
}
MODELS = {
    "dense": {},
    "states": _STATES,
    "experts": _EXPERTS,
    "window": _WINDOW,
    "bert": _BERT,
    "embedder": {"architectures": ["Qwen3Model"]},
    "unknown": {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"},
    "no-heads": {"num_attention_heads": 0},
    "a-text": {"hidden_size": "many"},
    "other-scaling": {"rope_scaling": {"rope_type": "no_such", "factor": 2.0}},
    "quantized": {"quantization_config": {"quant_method": "no_such", "bits": 4}},
}
DUMMY = ["--load-format", "dummy"]

# (model, flags, words of the refusal)
FOREIGN_LEVEL = "i8mm" if platform.machine() == "x86_64" else "amx"  # of other processors
ROWS: list[tuple[str, str, str | None]] = [
    # ---- precision
    ("dense", "", None),
    ("dense", "--dtype bfloat16", None),
    ("dense", "--dtype float16", None),
    ("dense", "--dtype float8", "--dtype"),
    ("dense", "--quantization int8", None),
    ("dense", "--quantization int4", None),
    ("dense", "--quantization int8 --dtype float32", "--quantization int8 supports bfloat16 activations only"),
    ("quantized", "", "no_such"),
    ("dense", "--kv-cache-dtype fp8", None),
    ("dense", "--kv-cache-dtype int8 --dtype bfloat16", None),
    ("states", "--kv-cache-dtype fp8", None),
    ("bert", "--kv-cache-dtype fp8", "an encoder, which keeps no keys and values"),
    # ---- ranks
    ("dense", "--tensor-parallel-size 3", "num_attention_heads 4 cannot be split"),
    ("dense", "--pipeline-parallel-size 9", "pipeline_parallel_size 9 is more than"),
    ("dense", "--enable-expert-parallel", "has no experts"),
    ("experts", "--enable-expert-parallel", None),
    ("dense", "--distributed-executor-backend uniproc --tensor-parallel-size 2", "uniproc"),
    ("dense", "--distributed-executor-backend no_such:Executor", "no_such:Executor"),
    ("dense", "--data-parallel-size 2 --max-model-len 4096", "--max-model-len 4096 is more than"),
    # ---- room
    ("dense", "--max-model-len 2048", None),
    ("dense", "--max-model-len 2049", "--max-model-len 2049 is more than this model's 2048 tokens"),
    ("dense", "--max-model-len 0", "--max-model-len"),
    ("dense", "--kv-cache-memory-bytes 10", "--kv-cache-memory-bytes 10 is too small"),
    ("dense", "--kv-cache-memory-bytes 1M", None),
    ("dense", "--kv-cache-memory-bytes 1M --max-model-len 2048", "--max-model-len 2048 needs"),
    ("dense", "--num-gpu-blocks-override 3 --max-model-len 64", "set --max-model-len to at most 32"),
    ("dense", "--num-gpu-blocks-override 3", None),
    ("states", "--max-num-seqs 64 --kv-cache-memory-bytes 60000", "the recurrent states of 64 requests"),
    ("states", "--max-num-seqs 8 --kv-cache-memory-bytes 240K", None),
    ("bert", "--max-num-batched-tokens 16 --max-model-len 64", "an encoder computes a prompt in one step"),
    ("bert", "--max-num-batched-tokens 16", None),
    ("dense", "--kv-offload-gib 99999999", "--kv-offload-gib"),
    ("dense", "--kv-offload-gib 0.01", None),
    ("window", "--max-num-seqs 2 --cache-reuse 16", None),
    # ---- attention
    ("dense", "--block-size 32", None),
    ("dense", "--block-size 7", None),
    ("dense", "--attention-backend flash", "--attention-backend is 'flash'"),
    ("dense", "--attention-backend flash_attn_2", "flash_attn_2"),
    ("dense", "--attention-backend cpu_paged", None),
    ("dense", "--deterministic", "--deterministic"),
    ("dense", f"--cpu-level {FOREIGN_LEVEL}", FOREIGN_LEVEL),
    # ---- drafts
    ("dense", "--speculative-config {{'method':'ngram'}}", None),
    ("dense", "--speculative-config {{'method':'mtp'}}", "the model has no prediction head"),
    ("dense", "--speculative-config {{'method':'no_such'}}", "no_such"),
    ("dense", "--speculative-config {{'method':'draft_model','model':'{dense}'}}", None),
    ("dense", "--speculative-config {{'method':'draft_model','model':'{tmp}/none'}}", "none"),
    ("dense", "--speculative-config {{'method':'draft_model','model':'{bert}'}}", "BertModel generates no text"),
    ("dense", "--speculative-config {{'method':'eagle3','model':'{dense}'}}", "names no EAGLE-3 head"),
    # ---- adapters
    ("dense", "--enable-lora", None),
    ("dense", "--enable-lora --max-loras 4 --max-cpu-loras 2", "--max-cpu-loras 2 must be at least"),
    ("dense", "--lora-modules a={tmp}/none", "--lora-modules a"),
    ("dense", "--lora-modules a", "--lora-modules"),
    ("dense", "--lora-modules a={adapter}", None),
    ("dense", "--lora-modules dense={adapter} --served-model-name dense", "a name of the model itself"),
    ("dense", "--lora-modules a={adapter} --max-lora-rank 1", "rank"),
    ("dense", "--lora-modules a={wide_adapter}", "--lora-modules a"),
    ("dense", "--lora-dir {tmp}/none", "--lora-dir"),
    ("bert", "--enable-lora", "this model is an encoder"),
    # ---- tiers
    ("dense", "--slot-save-path {tmp}/a_file/x", "--slot-save-path"),
    ("dense", "--slot-save-path {tmp}/slots", None),
    ("dense", "--kv-disk {tmp}/disk", None),
    ("dense", "--kv-disk {tmp}/a_file/x", None),  # a warning: blocks are a convenience
    ("bert", "--slot-save-path {tmp}/a_file/x", None),  # no cache
    ("dense", "--no-enable-prefix-caching --slot-save-path {tmp}/a_file/x", None),
    ("dense", "--kv-events-config {{'enable_kv_cache_events':true,'endpoint':'nowhere'}}", "endpoint"),
    # ---- pooling
    ("embedder", "", None),
    ("embedder", "--pooling mean", None),
    ("dense", "--pooling yes-no", "the tokenizer lacks the token 'yes'"),
    ("embedder --broken-modules", "", "the step 'NoSuch' is not supported"),
    # ---- the model's files
    ("unknown", "", "NoSuchForCausalLM"),
    ("no-heads", "", "num_attention_heads"),
    ("a-text", "", "hidden_size"),
    ("other-scaling", "", "no_such"),
    ("dense --no-config", "", "config.json"),
    ("dense --broken-config", "", "config.json"),
    ("dense --no-tokenizer", "", "tokenizer"),
    ("dense --broken-tokenizer", "", "tokenizer"),
    ("dense", "--load-format safetensors", "no model.safetensors"),
    ("real", "--load-format auto", None),
    ("real --other-size", "--load-format auto", "mlp.gate_proj.weight is [160, 64], expected [96, 64]"),
    (
        "real",
        "--load-format auto --speculative-config {{'method':'draft_model','model':'{unweighted}'}}",
        "no model.safetensors",
    ),
    ("real", "--load-format auto --speculative-config {{'method':'draft_model','model':'{real}'}}", None),
    ("dense --torch-weights", "--load-format auto", "which is not supported"),
    ("dense", "--tokenizer {tmp}/none", "none"),
    # ---- text
    ("dense", "--chat-template {tmp}/none.jinja", "chat_template: there is no file"),
    ("dense", "--generation-config {tmp}/none", "generation_config: cannot read"),
    ("dense", "--tool-call-parser no_such", "no_such"),
    ("dense", "--reasoning-parser no_such", "no_such"),
    ("dense", "--generic-tool-prompt --tool-call-parser hermes", "--generic-tool-prompt"),
    # ---- the server's files
    ("dense", "--ssl-certfile {tmp}/none.pem", "--ssl-certfile"),
    ("dense", "--ssl-keyfile {tmp}/none.pem", "--ssl-keyfile needs --ssl-certfile"),
    ("dense", "--api-key-file {tmp}/none.yaml", "--api-key-file"),
    ("dense", "--audit-log {tmp}/a_file/x", "--audit-log"),
    ("dense", "--batch-dir {tmp}/a_file/x", "--batch-dir"),
    ("dense", "--responses-store {tmp}/a_file/x", "--responses-store"),
    ("dense", "--port 99999", "--port"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory, checkpoint) -> dict[str, str]:
    """The folders that rows name."""
    tmp = tmp_path_factory.mktemp("places")
    found = {"tmp": str(tmp), "adapter": str(tmp / "adapter"), "wide_adapter": str(tmp / "wide")}
    found |= {"real": checkpoint("qwen3"), "unweighted": str(tmp / "unweighted")}
    shutil.copytree(found["real"], found["unweighted"], ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp / "a_file").touch()
    for name, config in MODELS.items():
        (tmp / name).mkdir()
        found[name] = write_light_model(tmp / name, **config)
    for name, width in (("adapter", 64), ("wide_adapter", 65)):
        prefix = "base_model.model.model.layers.0.self_attn.q_proj"
        tensors = {f"{prefix}.lora_A.weight": torch.ones(2, width), f"{prefix}.lora_B.weight": torch.ones(128, 2)}
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
        write_adapter(Path(found[name]), config, tensors)
    return found


def model_of(text: str, places: dict[str, str], tmp_path: Path) -> str:
    """The folder of a model, a copy if its files are changed."""
    name, *changes = text.split(" --")
    if not changes:
        return places[name]
    folder = tmp_path / "model"
    shutil.copytree(places[name], folder)
    for change in changes:
        match change:
            case "no-config":
                (folder / "config.json").unlink()
            case "broken-config":
                (folder / "config.json").write_text("[")
            case "other-size":
                config = json.loads((folder / "config.json").read_text())
                (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
            case "no-tokenizer":
                (folder / "tokenizer.json").unlink()
                (folder / "tokenizer_config.json").unlink()
            case "broken-tokenizer":
                (folder / "tokenizer.json").write_text("{}")
            case "torch-weights":
                (folder / "pytorch_model.bin").touch()
            case "broken-modules":
                module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.NoSuch"}
                (folder / "modules.json").write_text(json.dumps([module]))
    return str(folder)


def checked(arguments: list[str], capsys) -> tuple[int, str]:
    """Return exit code and message of `quire check`."""
    code = run(["check", *arguments])
    found = re.search(r"^quire check: error: (.*)$", capsys.readouterr().err, re.MULTILINE | re.DOTALL)
    return code, found[1].strip() if found else ""


def served(arguments: list[str], capsys) -> tuple[int, str]:
    """Return exit code and message of the start of `quire serve`."""
    errors = Errors()
    logging.getLogger().addHandler(errors)
    try:
        with starts_in_process():
            code = run(["serve", *arguments, "--port", "0"] if "--port" not in arguments else ["serve", *arguments])
    finally:
        logging.getLogger().removeHandler(errors)
    found = re.search(r"^quire serve: error: (.*)$", capsys.readouterr().err, re.MULTILINE | re.DOTALL)
    messages = [found[1].strip()] if found else [one.removeprefix("cannot start: ") for one in errors.messages]
    return code, "\n".join(messages)


def _without_free(message: str) -> str:
    """A message without what is free, which changes between two starts."""
    return re.sub(r"the [\d.]+ GiB of RAM|at most [\d.]+$", "free", message)


def rows():
    """The table; rows that start a server in the end take longer."""
    for model, flags, words in ROWS:
        yield pytest.param(model, flags, words, id=f"{model} {flags}"[:70], marks=() if words else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "flags", "words"), list(rows()))
def test_check_and_serve_agree(model, flags, words, places, tmp_path, capsys):
    arguments = [part.format(**places).replace("'", '"') for part in flags.split()]
    if "--load-format" not in arguments:
        arguments += DUMMY
    arguments = [model_of(model, places, tmp_path), *arguments, "--device", "cpu", "--log-level", "error"]
    check, serve = checked(arguments, capsys), served(arguments, capsys)
    assert (check[0], _without_free(check[1])) == (serve[0], _without_free(serve[1]))
    assert words in check[1] if words else check == (0, "")
