"""Well-known settings of other servers that have another name in quire or are not supported.

The nearest of our names would be misleading advice for them. The keys are spelled as in a configuration file:
`n_gpu_layers` stands for `--n-gpu-layers`.
"""

from __future__ import annotations

_STRUCTURED = "not needed: one library enforces every structure that a request asks for"
_DRAFT_MODEL = 'set --speculative-config \'{"method": "draft_model", "model": MODEL}\''
_NUM_DRAFT = "set --speculative-config '{\"num_speculative_tokens\": N}'"
_TASK = "not needed: what a model can do is read from its files; --pooling lets a text model make embeddings"
_POOLER = "set --pooling (normalize and dimensions are fields of a request)"
_LAYERS = "the whole model runs on one kind of device: set --device cpu or --device cuda"
_MODEL = "give the folder, GGUF file or Hub id as MODEL, the first argument"
_TIERS = "set --kv-offload-gib (RAM) and --kv-disk"
_LENGTH = "set --max-model-len (prompt and output together)"

BY_SERVER: dict[str, dict[str, str]] = {
    "vLLM": {
        "guided_decoding_backend": _STRUCTURED,
        "structured_outputs_config": _STRUCTURED,
        "speculative_model": _DRAFT_MODEL,
        "num_speculative_tokens": _NUM_DRAFT,
        "mm_processor_cache_type": "preprocessed images are always kept in shared memory: --mm-processor-cache-gb",
        "mm_shm_cache_max_object_size_mb": "set --mm-processor-cache-gb",
        "interleave_mm_strings": "images and texts of a message always keep their order",
        "media_io_kwargs": "not supported: images are decoded alike for all models; --mm-processor-kwargs sizes them",
        "skip_mm_profiling": "not supported",
        "logits_processors": "not needed for DeepSeek-OCR: requests choose its n-gram processor with vllm_xargs "
        '{"ngram_size": 30, "window_size": 90}; others are not supported',
        "calculate_kv_scales": "not needed: without scales in the checkpoint, each head of a token gets its own",
        "cpu_offload_gb": "not supported: use a smaller model, or share it among GPUs with --tensor-parallel-size",
        "kv_transfer_config": _TIERS,
        "kv_offloading_size": "set --kv-offload-gib",
        "swap_space": "not needed: a preempted request is computed again instead of swapped",
        "enable_chunked_prefill": "prompts are always prefilled in chunks; --max-num-batched-tokens sets their size",
        "compilation_config": "torch.compile is not used; --enforce-eager turns CUDA graphs off",
        "profiler_config": "set --torch-profiler-dir",
        "disable_log_requests": "set --log-level warning to omit the access log",
        "enable_log_requests": "requests are logged with --log-level info",
        "disable_log_stats": "set --log-stats-interval 0",
        "uvicorn_log_level": "set --log-level",
        "task": _TASK,
        "runner": _TASK,
        "convert": _TASK,
        "pooler_config": _POOLER,
        "override_pooler_config": _POOLER,
        "is_embedding": _TASK,
        "hf_token": "set the environment variable HF_TOKEN",
        "override_generation_config": "set --generation-config to a folder with a generation_config.json",
    },
    "SGLang and TGI": {
        "model_path": _MODEL,
        "model_id": _MODEL,
        "tp": "set --tensor-parallel-size",
        "tp_size": "set --tensor-parallel-size",
        "num_shard": "set --tensor-parallel-size",
        "dp_size": "set --data-parallel-size",
        "context_length": _LENGTH,
        "max_total_tokens": _LENGTH,
        "mem_fraction_static": "set --gpu-memory-utilization",
        "max_running_requests": "set --max-num-seqs",
        "max_concurrent_requests": "set --max-num-seqs (running) or --max-num-queued-reqs (waiting)",
        "chunked_prefill_size": "set --max-num-batched-tokens",
        "disable_radix_cache": "set --no-enable-prefix-caching",
        "enable_hierarchical_cache": _TIERS,
        "hicache_size": "set --kv-offload-gib",
        "disable_cuda_graph": "set --enforce-eager",
        "quantize": "set --quantization int8 or int4",
    },
    "llama.cpp and Ollama": {
        "m": _MODEL,
        "hf_repo": _MODEL,
        "ngl": _LAYERS,
        "gpu_layers": _LAYERS,
        "n_gpu_layers": _LAYERS,
        "c": _LENGTH,
        "ctx_size": _LENGTH,
        "num_ctx": _LENGTH,
        "t": "set --num-threads",
        "threads": "set --num-threads",
        "np": "set --max-num-seqs",
        "parallel": "set --max-num-seqs",
        "batch_size": "set --max-num-batched-tokens",
        "n_predict": "set max_tokens in the request",
        "flash_attn": "the attention backend is chosen automatically; --attention-backend forces one",
        "model_draft": _DRAFT_MODEL,
        "md": _DRAFT_MODEL,
        "draft": _NUM_DRAFT,
        "draft_n": _NUM_DRAFT,
        "draft_max": _NUM_DRAFT,
        "draft_min": "not needed: drafts of any length are verified",
        "spec_type": 'set --speculative-config \'{"method": "ngram"}\' (or suffix, grammar, auto, none)',
        "jinja": "chat templates are always Jinja",
        "chat_template_file": "set --chat-template to the file",
        "cache_ram": "set --kv-offload-gib",
        "alias": "set --served-model-name",
        "embedding": _TASK,
        "embeddings": _TASK,
    },
}
FOREIGN_SETTINGS: dict[str, str] = {name: advice for server in BY_SERVER.values() for name, advice in server.items()}
