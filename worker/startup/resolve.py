"""First stage of a start: everything that is known, and refused, without weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from quire.configs.config import Config
from quire.worker import estimates
from quire.worker.cache.tiers.open import plan_tiers, ram_bytes
from quire.worker.limits import Choice, Limits, check_settings, resolve_limits
from quire.worker.lora.adapters import LoraLimits
from quire.worker.memory import cache_plan, check_cache
from quire.worker.messages import TierInfo
from quire.worker.models.registry import read_model_spec, without_memory
from quire.worker.platform import get_platform
from quire.worker.platforms.base import Platform
from quire.worker.spec.cache import CachePlan
from quire.worker.spec.index import without_indexes
from quire.worker.spec.model import ModelSpec
from quire.worker.startup.ranks import Ranks
from quire.worker.transformer.decoder import CausalLM, Decoder
from quire.worker.transformer.pooling import PoolingSpec, read_pooling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The model, the device and the limits of a start, before weights are loaded."""

    config: Config
    platform: Platform
    spec: ModelSpec
    limits: Limits
    cache: CachePlan  # the groups of layers that share block tables
    pooling: PoolingSpec | None
    lora: LoraLimits | None
    tiers: list[TierInfo]
    num_ranks: int  # for this engine
    num_local: int  # for all engines on this machine
    memory: tuple[int, int]  # (total, available) bytes of a rank before anything was loaded
    started: list[Choice]  # by the device

    @property
    def records_graphs(self) -> bool:
        """Return whether steps will be recorded, unless the loaded experts prevent it."""
        return estimates.uses_graphs(self.config, self.spec, self.limits, self.platform)

    @property
    def tier_ram(self) -> int:
        """Return bytes of RAM that the tiers of a rank may take."""
        return ram_bytes(self.tiers) // self.num_ranks


def resolve(config: Config, ranks: Ranks, *, preview: bool = False) -> Resolved:
    """Read the model's files except its weights, start the device, and join the other ranks. A `preview` compiles
    nothing.

    Raises ValueError for each setting that does not fit the model, the device or the machine. Refusals that need no
    device come first: a rank must not wait for one that has refused.
    """
    options = config.model
    spec = read_model_spec(options.model, options.model_impl, images=not options.language_model_only)
    longest = options.max_model_len
    spec = without_indexes(spec, int(longest) if longest.isdigit() else spec.max_model_len)
    check_settings(config, spec)
    pooling = read_pooling(options.model, spec, options.pooling, options.matryoshka)
    lora = LoraLimits.from_config(config.lora) if config.lora.enabled else None
    platform, *_ = [get_platform(config.device.device, number) for number in ranks.devices]
    num_local = ranks.local_size * config.parallel.data_parallel_size
    started = _start(platform, config, num_local, preview)
    if ranks.number == 0 and (warning := platform.ops_warning()):
        logger.warning("%s", warning)
    memory = platform.memory(num_local)
    ranks.join(platform)
    shares = not (spec.is_encoder or spec.crosses)  # whether requests begin with others' prefixes
    tiers = plan_tiers(config, platform, ranks.minimum) if shares else []  # before any rank promises memory
    limits = resolve_limits(config, spec, platform)
    spec = limits.with_drafts(spec)
    check_cache(config, spec, limits)
    if limits.speculation.eagle:
        _check_streams(without_memory(spec, limits.dtype))
    return Resolved(
        config,
        platform,
        spec,
        limits,
        cache_plan(config, spec, limits),
        pooling,
        lora,
        tiers,
        ranks.size,
        num_local,
        memory,
        started,
    )


def _start(platform: Platform, config: Config, num_local: int, preview: bool) -> list[Choice]:
    device = config.device
    return platform.start(
        device.num_threads,
        num_local,
        device.deterministic is True,
        config.server.api_server_count,
        device.cpu_level,
        device.cpu_activation_bits,
        preview=preview,
    )


def _check_streams(target: CausalLM) -> None:
    """Raise ValueError if the model has no hidden states that an EAGLE-3 head could read."""
    if type(target.model).forward is not Decoder.forward:
        raise ValueError(
            f"--speculative-config: method eagle3 is not supported for {target.spec.architecture}: its layers have no "
            "single residual stream"
        )
