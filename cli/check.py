"""`quire check`: print the memory plan and the choices of `quire serve` with the same flags, or the error it would end
with, without loading weights.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
from typing import TYPE_CHECKING

from quire.configs.config import Config
from quire.configs.files import check_model_folder
from quire.server.startup import hub
from quire.server.startup.plan_table import plan_table

if TYPE_CHECKING:
    from quire.server.media.service import Images


def check(config: Config) -> int:
    """Print the plan; returns 1 if `quire serve` would refuse. Downloads only the small files of a Hub model."""
    logging.basicConfig(level=config.server.log_level.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        print(plan(config))
    except ValueError as error:
        print(f"quire check: error: {error}", file=sys.stderr)
        return 1
    return 0


def plan(config: Config) -> str:
    """The memory plan and the choices, as `quire serve` shows them. Raises ValueError as it would."""
    from quire.server.generate.sampling import read_sampling_defaults
    from quire.server.media.service import Images
    from quire.server.text.tokenizer import Tokenizer

    options = config.model
    folder = hub.resolve(
        options.model, revision=options.revision, download_dir=options.download_dir, tokenizer_only=True
    )
    config = dataclasses.replace(config, model=dataclasses.replace(options, model=folder))
    check_model_folder(folder)
    # imported by name: torch loads only when this command runs
    importlib.import_module("quire.worker.loader").check_model(
        config, files=hub.local_folder(options.model) is not None
    )
    ready = importlib.import_module("quire.worker.memory").preview(config)
    tokenizer_folder = (
        folder
        if options.tokenizer is None
        else hub.resolve(options.tokenizer, download_dir=options.download_dir, tokenizer_only=True)
    )
    tokenizer = Tokenizer.load(
        tokenizer_folder, chat_template=config.server.chat_template, trust_remote_code=options.trust_remote_code
    )
    defaults = read_sampling_defaults(config, folder)
    images = Images(config)
    images.open(folder, tokenizer)
    images.check_worker(ready.media)
    chat = "none: /v1/chat/completions needs --chat-template"
    if tokenizer.chat_templates:
        chat = "yes"
    elif images.why_not is None:
        chat = "none: a conversation is the contents of its messages, one after another"
    sampling = ", ".join(f"{name} {value}" for name, value in defaults.items()) or "OpenAI's"
    lines = [plan_table(ready), f"chat template: {chat}", *_about(images, folder)]
    return "\n".join([*lines, f"default sampling parameters: {sampling}"])


def _about(images: Images, folder: str) -> list[str]:
    """What the server does with images; nothing for a model of text."""
    from quire.server.media.registry import read_config

    if images.why_not is None:
        about = images.describe()
        options = ", ".join(about["mm_processor_kwargs"]) or "none"
        return [f"images: at most {about['max_per_prompt']} per prompt; mm_processor_kwargs: {options}"]
    return [f"images: refused: {images.why_not}"] if "vision_config" in read_config(folder) else []
