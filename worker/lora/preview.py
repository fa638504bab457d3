"""The output of `quire check` about LoRA adapters, without reading weights of the model."""

from __future__ import annotations

import logging

from quire.checkpoints.lora import folders_at_start, read_lora
from quire.configs.config import Config
from quire.worker.layers.lora import StepLora
from quire.worker.lora.adapters import LoraLimits
from quire.worker.lora.reading import open_matrices
from quire.worker.lora.targets import Targets
from quire.worker.weights.loader import check_model

logger = logging.getLogger("quire")


def describe_adapters(config: Config) -> list[str]:
    """Return a line per adapter that a server would start with. Raises ValueError as the server would."""
    lora = config.lora
    if not lora.enabled:
        return []
    limits, targets, lines = LoraLimits.from_config(lora), Targets(check_model(config, files=False), StepLora()), []
    for name, path, is_given in folders_at_start(lora.lora_modules, lora.lora_dir):
        try:
            lora = read_lora(path)
            targets.check(lora, limits.max_rank)
            with open_matrices(lora) as read:
                for matrices in lora.modules.values():
                    read(matrices.a, matrices.index), read(matrices.b, matrices.index)
        except ValueError as error:
            if is_given:
                raise ValueError(f"--lora-modules {name}: {error}") from None
            logger.warning("--lora-dir: leaving out %s: %s", name, error)
            continue
        modules = sorted({module.rpartition(".")[2] for module in lora.modules})
        lines.append(f"LoRA adapter {name}: rank {lora.rank}, {len(lora.modules)} modules: {', '.join(modules)}")
    return lines
