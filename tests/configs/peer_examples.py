"""What other servers' flags set: names -> (text, value). None: the setting is left alone; "warning": that, with a
warning; "error: ": the start ends with this message.
"""

from __future__ import annotations

from typing import Any

_ONE = [("2", 2)]
_BATCH = [("2048", 2048)]
_LENGTH = [("4096", "4096"), ("x", "error: expected auto or a number of tokens")]
_ZERO_LENGTH = [*_LENGTH, ("0", None)]
_DRAFT = {"num_speculative_tokens": 8}
_CACHE = [("q8_0", "int8"), ("f32", "float32"), ("f16", None), ("bf16", None), ("q4_0", "error: q4_0: keys and values")]
_ON_OFF = [("1", True), ("false", False), ("disabled", False), ("x", "error: expected true or false")]
_LIST = [("a,b", ["a", "b"]), ('["a", "b"]', ["a", "b"])]

EXAMPLES: dict[str, list[tuple[str, Any]]] = {
    # the model
    "-m LLAMA_ARG_MODEL --model-path --model-id": [("x.gguf", "x.gguf")],
    "-hf -hfr --hf-repo LLAMA_ARG_HF_REPO": [("org/name:Q8_0", "org/name:Q8_0")],
    "-hff --hf-file LLAMA_ARG_HF_FILE": [("a.gguf", "org/name/a.gguf")],
    "--tokenizer-path": [("t", "t")],
    "-a LLAMA_ARG_ALIAS": _LIST,
    "LLAMA_ARG_MODELS_DIR": [("/d", "/d")],
    "--models-preset LLAMA_ARG_MODELS_PRESET": [("f.ini", "f.ini")],
    "LLAMA_ARG_MODELS_MAX OLLAMA_MAX_LOADED_MODELS": [("3", 3)],
    "OLLAMA_KEEP_ALIVE": [("10m", "10m"), ("soon", "error: 'soon' is no duration")],
    "--model-alias --model-name": [("a", ["a"])],
    "-q": [("int8", "int8"), ("awq", "warning"), ("fp8", "error: fp8: 16-bit weights")],
    "--quantize": [("int4", "int4"), ("gptq", "warning"), ("eetq", "error: eetq: 16-bit weights")],
    "--huggingface-hub-cache --weights-cache-override": [("/d", "/d")],
    # sizes
    "-tp --tp --tp-size --num-shard -pp --pp --pp-size -dp --dp --dp-size -asc --tokenizer-worker-num": _ONE,
    "-dpn -dpr -dpl": _ONE,
    "-dpa": [("10.0.0.1", "10.0.0.1")],
    "-dpp": [("13345", 13345)],
    "-dph": [("", True)],
    "-ep": [("", True)],
    "--ep --ep-size --expert-parallel-size": [("2", True), ("1", None)],
    "--device-memory-utilization --mem-fraction-static --cuda-memory-fraction": [
        ("0.5", 0.5), ("2", "error: at most 1"),
    ],
    "--max-num-active-seqs --max-num-seq --max-running-requests --max-batch-size": _ONE,
    "-np --parallel LLAMA_ARG_N_PARALLEL": [*_ONE, ("-1", None)],
    "OLLAMA_NUM_PARALLEL": [*_ONE, ("0", None)],
    "--max-queued-requests --max-concurrent-requests OLLAMA_MAX_QUEUE": [("9", 9)],
    "--max-num-scheduled-tokens --max-prefill-tokens --max-batch-prefill-tokens": _BATCH,
    "-b --batch-size LLAMA_ARG_BATCH": _BATCH,
    "-ub --ubatch-size LLAMA_ARG_UBATCH": [*_BATCH, ("2", "error: vLLM's number of micro-batches")],
    "--chunked-prefill-size": [*_BATCH, ("-1", "warning")],
    "--context-length --n-ctx --num-ctx --ctx-len": _LENGTH,
    "-c --ctx-size LLAMA_ARG_CTX_SIZE OLLAMA_CONTEXT_LENGTH": _ZERO_LENGTH,
    "--page-size": [("16", 16)],
    "-t --threads LLAMA_ARG_THREADS": [("4", 4), ("-1", None)],
    "--n-threads --num-thread": [("4", 4)],
    "--max-top-n-tokens": [("5", 5)],
    "--payload-limit": [("2000000", 2_000_000)],
    "--graceful-termination-timeout -g --watchdog-timeout": [("90", 90.0)],
    # the cache
    "-ctk --cache-type-k LLAMA_ARG_CACHE_TYPE_K -ctv --cache-type-v LLAMA_ARG_CACHE_TYPE_V": _CACHE,
    "OLLAMA_KV_CACHE_TYPE": _CACHE,
    "-cram --cache-ram LLAMA_ARG_CACHE_RAM": [("8192", 8.0), ("0", 0.0), ("-1", "error: needs a limit")],
    "--kv-offloading-size --hicache-size": [("8", 8.0)],
    "LLAMA_ARG_CACHE_PROMPT": _ON_OFF,
    "--no-cache-prompt --disable-radix-cache": [("", False)],
    "LLAMA_ARG_CACHE_REUSE": [("16", 16)],
    "LLAMA_ARG_SLOT_SAVE_PATH --file-storage-path": [("/d", "/d")],
    # steps and devices
    "--no-async-scheduling --disable-async-output-proc --disable-overlap-schedule": [("", 1)],
    "--schedule-policy": [("fcfs", "fcfs"), ("priority", "priority"), ("lpm", "warning")],
    "--enable-priority-scheduling": [("", "priority")],
    "--use-ray": [("", "ray")],
    "--random-seed": [("7", 7)],
    "--enable-deterministic-inference --disable-cuda-graph": [("", True)],
    "-ngl --gpu-layers --n-gpu-layers LLAMA_ARG_N_GPU_LAYERS": [
        ("0", "cpu"), ("99", None), ("all", None), ("-1", None), ("20", "warning"), ("x", "error: expected a number"),
    ],
    "-dev LLAMA_ARG_DEVICE": [("none", "cpu"), ("CUDA1", "error: CUDA_VISIBLE_DEVICES")],
    "--cpu": [("", "cpu")],
    "--gpu --cuda": [("", "cuda")],
    # defaults of requests
    "--temp --temperature LLAMA_ARG_TEMPERATURE": [("0.7", {"temperature": 0.7})],
    "--top-k LLAMA_ARG_TOP_K": [("5", {"top_k": 5}), ("x", "error: expected a number")],
    "--top-p LLAMA_ARG_TOP_P": [("0.9", {"top_p": 0.9})],
    "--min-p LLAMA_ARG_MIN_P": [("0.1", {"min_p": 0.1})],
    "--repeat-penalty LLAMA_ARG_REPEAT_PENALTY": [("1.1", {"repetition_penalty": 1.1})],
    "--predict --n-predict LLAMA_ARG_N_PREDICT": [("64", {"max_new_tokens": 64}), ("-1", None)],
    "--preferred-sampling-params": [('{"top_k": 5}', {"top_k": 5}), ("x", "error: expected a JSON object")],
    "--sampling-defaults": [("openai", "vllm"), ("model", "auto"), ("x", "error: expected model or openai")],
    # drafts
    "-sc": [('{"method": "ngram"}', {"method": "ngram"})],
    "--spec-method --speculative-algorithm --spec-type LLAMA_ARG_SPEC_TYPE": [
        ("ngram", {"method": "ngram"}), ("NGRAM", {"method": "ngram"}), ("NEXTN", {"method": "mtp"}),
        ("medusa", "error: 'medusa' is not one of"),
    ],
    "--spec-default": [("", {"method": "auto"})],
    "--spec-model --speculative-model --speculative-draft-model-path --speculative-draft-model --spec-draft-model -md "
    "--model-draft LLAMA_ARG_SPEC_DRAFT_MODEL --spec-draft-hf -hfd -hfrd --hf-repo-draft "
    "LLAMA_ARG_SPEC_DRAFT_HF_REPO": [("d", {"model": "d"})],
    "--spec-tokens --num-speculative-tokens --speculative-num-draft-tokens --speculate --spec-draft-n-max "
    "LLAMA_ARG_SPEC_DRAFT_N_MAX --draft --draft-n --draft-max LLAMA_ARG_DRAFT_MAX --spec-ngram-mod-n-max "
    "--spec-ngram-simple-size-m --spec-ngram-map-k-size-m --spec-ngram-map-k4v-size-m --spec-ngram-size-m": [
        ("8", _DRAFT), ("x", "error: expected a whole number"), ("65", "error: num_speculative_tokens is 65"),
    ],
    "--ngram-prompt-lookup-max": [("4", {"method": "ngram", "prompt_lookup_max": 4})],
    "--ngram-prompt-lookup-min": [("2", {"method": "ngram", "prompt_lookup_min": 2})],
    "--spec-draft-n-min LLAMA_ARG_SPEC_DRAFT_N_MIN --draft-min --draft-n-min LLAMA_ARG_DRAFT_MIN": [
        ("0", {}), ("4", "error: drafts of any length are verified")
    ],
    # adapters and images
    "--lora-paths": [("a=/a", ["a=/a"]), ("/a", ["/a=/a"])],
    "--lora-adapters": [("a=/a,b=/b", ["a=/a", "b=/b"])],
    "--max-loras-per-batch --max-loaded-loras": [("4", 4)],
    "--limit-mm-data-per-request": [('{"image": 2}', {"image": 2})],
    "--media-url-max-file-size-mb": [("2", 2 << 20)],
    "--mm-preprocess-cache-size-mb": [("512", 0.5)],
    "--media-path": [("/d", "/d")],
    # answers
    "--chat-template-file LLAMA_ARG_CHAT_TEMPLATE_FILE LLAMA_ARG_CHAT_TEMPLATE": [("t.jinja", "t.jinja")],
    "--reasoning-format LLAMA_ARG_THINK": [
        ("none", "none"), ("auto", None), ("deepseek-legacy", "error: thoughts are"),
    ],
    "LLAMA_ARG_POOLING": [("last", "lasttoken"), ("mean", "mean")],
    # HTTP and the log
    "LLAMA_ARG_HOST --hostname --bind --listen --address": [("0.0.0.0", "0.0.0.0")],
    "LLAMA_ARG_PORT": [("8080", 8080)],
    "LLAMA_API_KEY VLLM_API_KEY": [("a,b", ["a", "b"])],
    "VLLM_LOGGING_LEVEL": [("DEBUG", "debug")],
    "VLLM_LOGGING_CONFIG_PATH": [("/etc/log.json", "/etc/log.json")],
    "VLLM_NIXL_SIDE_CHANNEL_HOST": [("10.0.0.1", "10.0.0.1")],
    "VLLM_NIXL_SIDE_CHANNEL_PORT": [("5601", 5601)],
    "VLLM_CPU_KVCACHE_SPACE": [("4", 4 << 30), ("0", None)],
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": [("5", 5.0)],
    "LLAMA_ARG_API_KEY_FILE --ssl-key-file LLAMA_ARG_SSL_KEY_FILE --ssl-cert-file LLAMA_ARG_SSL_CERT_FILE": [
        ("f", "f")
    ],
    "--api-prefix LLAMA_ARG_API_PREFIX --fastapi-root-path": [("/llm", "/llm")],
    "--cors-origins LLAMA_ARG_CORS_ORIGINS": [*_LIST, ("localhost", "error: name the origins")],
    "OLLAMA_ORIGINS": [*_LIST, ("http://localhost:*", "warning")],
    "--cors-allow-origin": _LIST,
    "--sse-ping-interval LLAMA_ARG_SSE_PING_INTERVAL": [("30", 30.0), ("-1", 0.0)],
    "--webui": [("", True)],
    "--no-webui": [("", False)],
    "LLAMA_ARG_UI LLAMA_ARG_WEBUI": _ON_OFF,
    "-v --verbose --log-verbose --debug": [("", "debug")],
    "-lv --verbosity --log-verbosity LLAMA_ARG_LOG_VERBOSITY": [("1", "error"), ("3", "info"), ("9", "debug")],
    "OLLAMA_DEBUG": [("1", "debug"), ("0", None)],
    "--log-disable": [("", "error")],
    "--log-jsonl --json-output": [("", "json")],
    "--no-log-jsonl": [("", "text")],
    "--disable-log-stats": [("", 0.0)],
    "--otlp-endpoint": [("http://h:4318", "http://h:4318")],
}  # fmt: skip
