"""Checks of settings that need no engine process, shared by `quire serve`, `quire check` and the offline `LLM`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from quire.checkpoints.early import refuse_early
from quire.checkpoints.files import check_model_folder, file_obstacle, folder_obstacle
from quire.checkpoints.lora import ELSEWHERE, check_counts, check_modules, folders_at_start
from quire.configs.config import Config
from quire.configs.serving import ServerConfig
from quire.server.startup.model_names import served_names


def check_server_files(server: ServerConfig) -> None:
    """Raise ValueError for a file or folder of the HTTP server that cannot be used. Creates none."""
    if server.ssl_certfile is not None or server.ssl_keyfile is not None:
        from quire.server.http.transport.tls import Tls

        Tls(server)
    if server.api_key_file is not None:
        from quire.server.keys.ring import KeyRing

        KeyRing(server, counts=False).close()
    if server.middleware:
        from quire.server.added_middleware import load_middleware

        load_middleware(server.middleware)
    for flag, path, obstacle in (
        ("--audit-log", server.audit_log, file_obstacle),
        ("--batch-dir", server.batch_dir, folder_obstacle),
        ("--responses-store", server.responses_store, file_obstacle),
    ):
        if path not in (None, ":memory:") and (why := obstacle(Path(path))) is not None:
            raise ValueError(f"{flag} {path}: {why}")


def local_config(config: Config, folder: str, draft: str | None, *, needs_weights: bool) -> Config:
    """Return the settings with the folders of the model and the draft model in place of their names.

    Raises ValueError if a folder has no model, or for settings that config.json alone refuses.
    """
    check_model_folder(folder, needs_weights=needs_weights)
    parallel, lora = config.parallel, config.lora
    refuse_early(folder, parallel.tensor_parallel_size, parallel.pipeline_parallel_size, config.model.max_model_len)
    if lora.enabled and parallel.names_machines:
        raise ValueError(
            f"{ELSEWHERE}: leave out --nnodes and --data-parallel-size-local, or --enable-lora, "
            "--lora-modules and --lora-dir"
        )
    check_counts(lora.max_loras, lora.max_cpu_loras)
    check_modules(lora.lora_modules)
    names = served_names(config)
    for name, _, _ in folders_at_start(lora.lora_modules, lora.lora_dir):
        if name in names:
            raise ValueError(f"LoRA adapter {name!r}: this is a name of the model itself")
    local = dataclasses.replace(config, model=dataclasses.replace(config.model, model=folder))
    if draft is None:
        return local
    check_model_folder(draft, needs_weights=needs_weights)
    return local.with_draft_model(draft)
