"""Implements `quire check`, which prints the memory plan and the choices of `quire serve` with the same flags, or its
error, without loading weights. For a Hub model it reads the headers of the weights by range requests.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from quire.checkpoints import hub
from quire.checkpoints.lora import local_modules
from quire.checkpoints.weight_summary import weight_summary
from quire.configs.config import Config
from quire.configs.options import removed_settings
from quire.configs.speculation import draft_model_of
from quire.server.startup.checks import check_server_files, local_config
from quire.server.startup.entry_settings import with_entry
from quire.server.startup.plan_table import plan_table

if TYPE_CHECKING:
    from quire.server.media.audio.service import Speech
    from quire.server.media.service import Images


def check(config: Config) -> int:
    """Print the plan; returns 1 if `quire serve` would refuse. Downloads only the small files of a Hub model."""
    logging.basicConfig(level=config.server.log_level.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)
    for warning in removed_settings(config):
        logging.warning("%s", warning)
    if not config.models.are_several:
        return _check_one(config)
    try:
        entries = importlib.import_module("quire.server.models.catalog").read_catalog(config)
    except ValueError as error:
        print(f"quire check: error: {error}", file=sys.stderr)
        return 1
    failed = 0
    for entry in entries:
        print(f"{entry.name}:", flush=True)
        failed |= _check_one(entry.config)
    return failed


def _check_one(config: Config) -> int:
    with tempfile.TemporaryDirectory(prefix="quire-check-") as target:
        try:
            print(plan(config, target))
        except ValueError as error:
            print(f"quire check: error: {error}".replace(target, config.model.model), file=sys.stderr)
            return 1
    return 0


def plan(config: Config, target: str) -> str:
    """Return the checkpoint, the memory plan and the choices, as `quire serve` shows them. `target` is an empty folder
    for headers of weights. Raises ValueError as `quire serve` would.
    """
    from quire.server.media.audio.service import Speech
    from quire.server.media.service import Images
    from quire.server.request.sampling import read_sampling_defaults
    from quire.server.startup.engine_group import PLAIN, read_text

    check_server_files(config.server)
    config.parallel.check_nodes(config.server.headless)
    if config.parallel.has_own_balancer:
        config = dataclasses.replace(config, parallel=config.parallel.on_this_machine())
    named = with_entry(config)
    config, has_weights, has_draft = local_settings(named, target)
    if not config.parallel.local_engines:
        return "no engine runs on this machine (--data-parallel-size-local 0)"
    options, folder = config.model, config.model.model
    # imported by name: torch loads only when this command runs
    importlib.import_module("quire.engine.executor.base").executor_class(config)
    preview = importlib.import_module("quire.worker.startup.preview").preview
    own = dataclasses.replace(config, parallel=config.parallel.on_this_machine())
    ready = preview(own, files=has_weights, draft_files=has_draft)
    adapters = importlib.import_module("quire.worker.lora.preview").describe_adapters(own)
    tokenizer_folder = (
        folder
        if options.tokenizer is None
        else hub.resolve(options.tokenizer, download_dir=options.download_dir, tokenizer_only=True)
    )
    defaults = read_sampling_defaults(named, folder)
    images = Images(config)
    tokenizer, _ = read_text(config, tokenizer_folder, images, folder)
    images.check_worker(ready.media)
    speech = Speech()
    speech.open(folder, tokenizer)
    speech.check_worker(ready.media)
    chat = "none: /v1/chat/completions needs --chat-template"
    if tokenizer.chat_templates == {"default": PLAIN}:
        chat = "none: a conversation is the contents of its messages, one after another"
    elif tokenizer.chat_templates:
        chat = "yes"
    warnings = [f"warning: {warning}" for warning in ready.warnings]
    lines = [plan_table(ready), *warnings]
    if speech.why_not is None:
        lines.append(_hears(speech))
    else:
        lines += [f"chat template: {chat}", *_about(images, folder), *adapters]
        lines.append(f"default sampling parameters: {defaults.describe()}")
    return "\n".join([_checkpoint(config, folder), *lines] if has_weights else lines)


def local_settings(config: Config, target: str) -> tuple[Config, bool, bool]:
    """Return the settings with folders of this machine, and whether the model and the draft model have the headers of
    their weights there.
    """
    options, has_weights, has_draft = config.model, False, False
    where = {"revision": options.revision, "download_dir": options.download_dir}
    if options.load_format == "dummy":
        folder = hub.resolve(options.model, tokenizer_only=True, **where)
    else:
        folder, has_weights = hub.resolve_headers(options.model, target=target, **where)
    if (draft := draft_model_of(config.scheduler.speculative_config)) is not None:
        has_draft = has_weights and hub.ready_folder(draft) is not None
        draft = hub.resolve(draft, tokenizer_only=True, download_dir=options.download_dir)
    modules = local_modules(config.lora.lora_modules, options.download_dir)
    config = dataclasses.replace(config, lora=dataclasses.replace(config.lora, lora_modules=modules))
    return local_config(config, folder, draft, needs_weights=has_weights), has_weights, has_draft


def _about(images: Images, folder: str) -> list[str]:
    """Return the server's handling of images; nothing for a model of text."""
    from quire.server.media.registry import read_config

    if images.why_not is None:
        about = images.describe()
        videos = [f"videos: {_accepted(about['video'])}"] if about["video"]["accepted"] else []
        return [f"images: {_accepted(about)}", *videos]
    return [f"images: refused: {images.why_not}"] if "vision_config" in read_config(folder) else []


def _accepted(about: dict[str, Any]) -> str:
    options = ", ".join(about["mm_processor_kwargs"]) or "none"
    return f"at most {about['max_per_prompt']} per prompt; mm_processor_kwargs: {options}"


def _hears(speech: Speech) -> str:
    """Return the server's handling of audio."""
    model = speech.model
    return f"audio: {', '.join(model.tasks) or 'transcribe'}; languages: {', '.join(model.codes)}"


def _checkpoint(config: Config, folder: str) -> str:
    models = importlib.import_module("quire.worker.models.registry")
    spec = models.read_model_spec(folder, config.model.model_impl, images=not config.model.language_model_only)
    raw = models.with_quantization(models.read_config(folder), folder)
    return weight_summary(folder, raw, models.num_parameters(spec))
