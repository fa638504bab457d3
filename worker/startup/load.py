"""Second stage of a start: the weights of this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from quire.configs.priority import run_nice
from quire.worker.layers.moe import pack_experts
from quire.worker.lora.adapters import Adapters
from quire.worker.models.registry import build_model
from quire.worker.parallel import Group, pp, use_groups
from quire.worker.pipeline import SingleStage, pipeline_stage
from quire.worker.sampling.speculation.draft_model import place_after
from quire.worker.sampling.speculation.draft_spec import draft_quantization
from quire.worker.startup.resolve import Resolved
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.pooling import Pooler
from quire.worker.weights.gguf_tensors import read_tensor
from quire.worker.weights.loader import load_weights

ReportProgress = Callable[[str, float], None]  # (phase, fraction of it)


@dataclass(frozen=True, slots=True)
class Loaded:
    """This rank's share of the model, its draft model and adapters."""

    model: CausalLM
    draft: CausalLM | None
    adapters: Adapters | None
    stage: SingleStage
    one_call: bool  # whether the experts of each layer are one call, for which the host does not wait

    @property
    def weights(self) -> int:
        """Return bytes of the parameters and tables."""
        return sum(map(_weight_bytes, (self.model, self.draft)))

    @property
    def cached(self) -> nn.ModuleList:
        """Return the modules whose layers have a KV cache."""
        return nn.ModuleList([self.model] if self.draft is None else [self.model, self.draft])


def load(resolved: Resolved, progress: ReportProgress) -> Loaded:
    """Build this rank's share of the model and of the draft model, and load their weights, with `load_niceness` on a
    CPU.

    Raises ValueError for files that do not fit config.json.
    """
    niceness = resolved.config.models.load_niceness or 0
    if not niceness or not resolved.platform.shares_ram:
        return _load(resolved, progress)
    with resolved.platform.one_thread():  # the others have their full priority
        return run_nice(niceness, lambda report: _load(resolved, report), progress)


def _load(resolved: Resolved, progress: ReportProgress) -> Loaded:
    platform, spec, limits = resolved.platform, resolved.spec, resolved.limits
    model = _load_model(resolved, progress)
    one_call = pack_experts(model)
    model.round_for_products()
    draft = _load_draft(resolved, model, progress)
    if resolved.pooling is not None:
        model.pooler = Pooler(resolved.pooling, spec.pooled_size, platform.device, read_tensor)
    adapters = None
    if resolved.lora is not None:
        adapters = Adapters(model, platform, resolved.lora, limits.deterministic)
    depth = resolved.config.scheduler.steps_in_flight or pp().size + 1
    max_draft = limits.speculation.max_drafts if limits.speculation.is_on else 0
    stage = pipeline_stage(pp(), depth, model.received_width, limits.dtype, platform.device, max_draft)
    return Loaded(model, draft, adapters, stage, one_call)


def _load_model(resolved: Resolved, progress: ReportProgress) -> CausalLM:
    platform, limits, options = resolved.platform, resolved.limits, resolved.config.model
    progress("loading weights", 0.0)
    platform.ops.use_packages(limits.dtype)
    model = build_model(
        resolved.spec, limits.dtype, platform.device, limits.max_model_len, options.quantization, platform.ops
    )
    load_weights(
        model,
        resolved.spec,
        options.model,
        options.load_format,
        options.seed,
        lambda fraction: progress("loading weights", fraction),
    )
    if limits.deterministic:
        platform.fix_order(model)
    return model


def _load_draft(resolved: Resolved, target: CausalLM, progress: ReportProgress) -> CausalLM | None:
    """Build and load the draft model, or the EAGLE-3 head, if there is one: whole, on the last pipeline stage."""
    platform, limits, options = resolved.platform, resolved.limits, resolved.config.model
    if limits.draft is None or not target.model.last:
        return None
    quantization = draft_quantization(resolved.config, limits.draft)
    with use_groups(pp=Group()):
        model = build_model(
            limits.draft, limits.dtype, platform.device, limits.max_model_len, quantization, platform.ops
        )
    if limits.speculation.eagle:
        model.share(target.model)
    load_weights(
        model,
        limits.draft,
        limits.speculation.model,
        options.load_format,
        options.seed,
        lambda fraction: progress("loading the draft model", fraction),
    )
    pack_experts(model)
    model.round_for_products()
    place_after(model, len(resolved.cache.specs))
    return model


def _weight_bytes(model: CausalLM | None) -> int:
    if model is None:
        return 0
    return sum(tensor.nbytes for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values())
