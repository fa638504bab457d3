"""The worker of one rank: its device, its share of the model, its KV cache and the model runner."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from quire.configs.config import Config
from quire.worker import estimates, memory
from quire.worker.batch.split_step import Output
from quire.worker.cache import allocation as kv_cache
from quire.worker.cache.tiers.base import Agree
from quire.worker.cache.tiers.open import plan_tiers, ram_bytes
from quire.worker.cache.tiers.over_cache import open_store
from quire.worker.cache.tiers.slots import SlotTier
from quire.worker.cache.tiers.store import TierStore
from quire.worker.cpu.fixed_order_linear import fix_order
from quire.worker.layers.moe import pack_experts
from quire.worker.limits import Limits, check_settings, resolve_limits
from quire.worker.lora.adapters import Adapters, LoraLimits
from quire.worker.measuring import make_runner, measure_activations
from quire.worker.messages import StepInput, WorkerReady
from quire.worker.model_runner import ModelRunner
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.parallel import Group, init_distributed, pp, shutdown_distributed, tp, use_groups
from quire.worker.pipeline import pipeline_stage
from quire.worker.platform import get_platform
from quire.worker.platforms.base import Platform, is_out_of_memory
from quire.worker.profiling import StepProfiler
from quire.worker.sampling.speculation.draft_model import place_after
from quire.worker.sampling.speculation.draft_spec import draft_quantization
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.decoder import CausalLM, Decoder
from quire.worker.transformer.pooling import Pooler, pooling_info, read_pooling
from quire.worker.weights.gguf_tensors import read_tensor
from quire.worker.weights.loader import load_weights

logger = logging.getLogger(__name__)


ReportProgress = Callable[[str, float], None]  # (phase, fraction of it)
# the part of the KV cache made resident ahead of use on CPU, as a multiple of the size of the weights: a small model
# should not take a large share of the machine's memory
WARM_SHARE = 8
MIN_WARM_BYTES = 64 << 20


class Worker:
    """The constructor starts nothing. Call `initialize`, then `execute` any number of steps in order, then `shutdown`,
    from threads of this process.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        world_size: int = 1,
        init_method: str | None = None,
        *,
        local_rank: int | None = None,
        local_size: int | None = None,
    ) -> None:
        """`local_size` ranks share this machine, and this one drives GPU number `local_rank`; by default all ranks are
        on this machine.
        """
        self.config, self.rank, self.world_size, self.init_method = config, rank, world_size, init_method
        self.local_rank = rank if local_rank is None else local_rank
        self.local_size = world_size if local_size is None else local_size
        self.runner: ModelRunner | None = None
        self.draft: CausalLM | None = None
        self.warmer: kv_cache.Warmer | None = None
        self.tiers: TierStore | None = None  # below the KV cache
        self.slots: SlotTier | None = None  # one of them
        self.gave_back = False  # whether the KV cache's memory was given back since the last step
        self.weights = 0  # bytes
        self.profiler = StepProfiler(config.device.torch_profiler_dir, rank)

    def initialize(self, progress: ReportProgress) -> WorkerReady:
        """Load the model and allocate the KV cache, reporting (phase, fraction).

        Raises ValueError for errors that the user can correct.
        """
        try:
            return self._initialize(progress)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(
                "out of device memory during start: free memory on the device, lower --gpu-memory-utilization "
                "(for the KV cache) or --max-num-batched-tokens and --max-num-seqs (for activations), or split the "
                f"model over several GPUs with --tensor-parallel-size. {error}"
            ) from error

    def _initialize(self, progress: ReportProgress) -> WorkerReady:
        config, tp_size = self.config, self.config.parallel.tensor_parallel_size
        spec = read_model_spec(config.model.model, config.model.model_impl, images=not config.model.language_model_only)
        check_settings(config, spec)  # before ranks wait for each other
        platform = get_platform(config.device.device, self.local_rank)
        num_ranks = self.local_size * config.parallel.data_parallel_size  # ranks on this machine
        threads = platform.start(
            config.device.num_threads,
            num_ranks,
            config.device.deterministic is True,
            config.server.api_server_count,
            config.device.cpu_level,
            config.device.cpu_activation_bits,
        )
        if self.rank == 0 and (warning := platform.ops_warning()):
            logger.warning("%s", warning)
        total, available = platform.memory(num_ranks)
        self._join_ranks(platform)
        agree = functools.partial(self._least, platform=platform)
        tiers = [] if spec.is_encoder else plan_tiers(config, platform, agree)  # before any rank promises memory
        pooling = read_pooling(config.model.model, spec, config.model.pooling, config.model.matryoshka)
        limits = resolve_limits(config, spec, platform)
        spec = limits.with_drafts(spec)
        memory.check_cache(config, spec, limits)
        model = self._load_model(spec, limits, platform, progress)
        one_call = pack_experts(model)
        model.round_for_products()
        self.draft = self._load_draft(model, spec, limits, platform, progress)
        if pooling is not None:
            model.pooler = Pooler(pooling, spec.hidden_size, platform.device, read_tensor)
        adapters = self._adapters(model, spec, limits, platform)
        weights = sum(map(_weight_bytes, (model, self.draft)))

        progress("profiling memory", 0.0)
        depth = config.scheduler.steps_in_flight or pp().size + 1
        max_draft = limits.speculation.most if limits.speculation.is_on else 0
        stage = pipeline_stage(pp(), depth, model.received_width, limits.dtype, platform.device, max_draft)
        cache = memory.cache_plan(config, spec, limits)
        activations = (
            measure_activations(model, spec, platform, limits, cache, stage)
            if platform.measures_memory
            else estimates.estimate_activations(spec, limits, tp_size)
        )
        activations += estimates.estimate_workspace(config, spec, limits, platform)
        progress("profiling memory", 1.0)

        progress("allocating KV cache", 0.0)
        if platform.measures_memory:
            # other processes on the GPU, and libraries, may have allocated memory meanwhile
            total, available = platform.memory(num_ranks)
        has_graphs = one_call and estimates.uses_graphs(config, spec, limits, platform)
        plan, num_blocks, num_states, choices = memory.plan_memory(
            config,
            spec,
            limits,
            device=platform.name,
            total=total,
            available=available,
            weights=weights,
            activations=activations,
            graphs=estimates.estimate_graphs(config, spec, limits, tp_size) if has_graphs else 0,
            images=estimates.estimate_images(spec, limits, platform) if pp().rank == 0 else 0,
            adapters=0 if adapters is None else LoraLimits.of(config.lora).num_bytes(adapters.targets),
            offload=ram_bytes(tiers) // self.world_size if platform.device.type == "cpu" else 0,
        )
        num_blocks, num_states = self._all_reduce_min(num_blocks, platform), self._all_reduce_min(num_states, platform)
        kv_bytes = num_blocks * plan.bytes_per_block
        plan = msgspec.structs.replace(plan, kv_cache=kv_bytes, reserve=plan.reserve + plan.kv_cache - kv_bytes)
        # other engines of this server were told to share what is available
        if platform.device.type == "cpu" and config.parallel.data_parallel_size == 1:
            sizes = plan.weights, plan.activations, plan.kv_cache, plan.images, plan.states, plan.adapters, plan.offload
            platform.promise_ram(sum(sizes))
        ready = memory.report(
            spec, platform, limits, plan, num_blocks, threads + choices, cache.groups, pp().size, num_states
        )
        check_ranks, max_model_len = config.parallel.debug_check_ranks, ready.max_model_len
        self.runner = make_runner(
            model,
            spec,
            platform,
            limits,
            cache,
            num_blocks,
            num_states,
            max_model_len,
            stage,
            check_ranks,
            adapters,
            self.draft,
            num_states - ready.num_states,
        )
        if adapters is not None:
            ready = msgspec.structs.replace(ready, max_loras=adapters.max_active)
        if has_graphs:
            self.runner.use_graphs(max_model_len)
            if config.device.record_graphs == "start":
                self._record_graphs(progress)
            else:
                ready = msgspec.structs.replace(ready, works_idle=True)
        if self.runner.measurement is not None:
            ready = msgspec.structs.replace(ready, works_idle=True)
        if pooling is not None:
            ready = msgspec.structs.replace(
                ready,
                pooling=pooling_info(pooling, model.pooler, spec),
                choices=[*ready.choices, ("pooling", "+".join(pooling.methods), pooling.reason)],
            )
        if platform.device.type == "cpu" and not spec.is_encoder and kv_cache.attention_layers(model):
            self.weights, self.warmer = weights, _start_warmer(self._cached(), weights)
            ready = msgspec.structs.replace(ready, gives_back=True)
        ready = msgspec.structs.replace(ready, tiers=tiers)
        self._open_tiers(ready, limits, platform, agree)
        progress("allocating KV cache", 1.0)
        return ready

    def _open_tiers(self, ready: WorkerReady, limits: Limits, platform: Platform, agree: Agree) -> None:
        """Open the tiers below the KV cache."""
        config, ram = self.config, ram_bytes(ready.tiers)
        if ram and platform.device.type != "cpu" and config.parallel.data_parallel_size == 1:
            platform.promise_ram(ram // self.world_size)
        storage = str(limits.kv) + (f", drafts of {limits.speculation.model}" if limits.draft else "")
        place = (self.rank, self.world_size, config.parallel.tensor_parallel_size)
        self.tiers = open_store(config, self._cached(), ready, storage, place, agree)
        if self.tiers is not None:
            self.slots = next((tier for tier in self.tiers.tiers if isinstance(tier, SlotTier)), None)

    def _least(self, numbers: list[int], platform: Platform) -> list[int]:
        """The least of each number over all ranks, which call this in the same order."""
        if self.world_size == 1 or not numbers:
            return numbers
        least = torch.tensor(numbers, device=platform.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return least.tolist()

    def _record_graphs(self, progress: ReportProgress) -> None:
        """Record a graph of every batch size, the largest first."""
        sizes, done = len(self.runner.forward.recordings), 0
        progress("recording CUDA graphs", 0.0)
        while self.runner.work_idle():
            done += 1
            progress("recording CUDA graphs", done / sizes)
        progress("recording CUDA graphs", 1.0)

    def _join_ranks(self, platform: Platform) -> None:
        """Join the process groups, and agree with the other ranks on the operations to use."""
        parallel = self.config.parallel
        init_distributed(
            self.rank,
            self.world_size,
            self.init_method or "",
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            backend=platform.dist_backend,
            expert_parallel=parallel.enable_expert_parallel,
        )
        if (group := tp()).size > 1 and (reason := platform.share_memory(group)) != "" and group.rank == 0:
            logger.info("all-reduces of small tensors: %s", f"NCCL, {reason}" if reason else "symmetric memory")
        self._agree_on_ops(platform)

    def _load_model(
        self, spec: ModelSpec, limits: Limits, platform: Platform, progress: ReportProgress
    ) -> CausalLM:
        """Build this rank's share of the model and load its weights."""
        options = self.config.model
        progress("loading weights", 0.0)
        platform.ops.use_packages(limits.dtype)
        model = build_model(
            spec, limits.dtype, platform.device, limits.max_model_len, options.quantization, platform.ops
        )
        if limits.speculation.eagle:
            _check_streams(model)
        load_weights(
            model,
            spec,
            options.model,
            options.load_format,
            options.seed,
            lambda fraction: progress("loading weights", fraction),
        )
        if limits.deterministic:
            fix_order(model)
        return model

    def _load_draft(
        self,
        target: CausalLM,
        spec: ModelSpec,
        limits: Limits,
        platform: Platform,
        progress: ReportProgress,
    ) -> CausalLM | None:
        """Build and load the draft model, or the EAGLE-3 head, if there is one: whole, on the last pipeline stage."""
        draft, options = limits.draft, self.config.model
        if draft is None or not target.model.last:
            return None
        quantization = draft_quantization(self.config, draft)
        with use_groups(pp=Group()):
            model = build_model(draft, limits.dtype, platform.device, limits.max_model_len, quantization, platform.ops)
        if limits.speculation.eagle:
            model.share(target.model)
        load_weights(
            model,
            draft,
            limits.speculation.model,
            options.load_format,
            options.seed,
            lambda fraction: progress("loading the draft model", fraction),
        )
        pack_experts(model)
        model.round_for_products()
        place_after(model, len(spec.layers))
        return model

    def _cached(self) -> nn.ModuleList:
        """The modules whose layers have a KV cache."""
        return nn.ModuleList([self.runner.model] if self.draft is None else [self.runner.model, self.draft])

    def _adapters(self, model: CausalLM, spec: ModelSpec, limits: Limits, platform: Platform) -> Adapters | None:
        """The memory for LoRA adapters; None if the server has none."""
        if not self.config.lora.enabled:
            return None
        return Adapters(model, platform, LoraLimits.of(self.config.lora), limits.deterministic)

    def execute(self, step: StepInput) -> Output:
        """Launch a step. Another thread may wait for its result."""
        assert self.runner is not None, "initialize first"
        self.profiler.step()
        self.look_for_ops()
        if step.stores:
            self.tiers.store(step.stores)
        if self.gave_back:
            self.gave_back, self.warmer = False, _start_warmer(self._cached(), self.weights)
        if self.warmer is None:
            return self.runner.execute(step)
        self.warmer.follow(step)
        try:
            return self.runner.execute(step)
        finally:
            self.warmer.rest()

    def set_vocabulary(self, vocabulary: bytes) -> None:
        """Take the tokens that grammars need, a `Vocabulary` as msgpack, before the first request with a grammar."""
        self.runner.sampler.grammars.set_vocabulary(vocabulary)

    def load_lora(self, key: str, folder: str) -> str:
        """Read a LoRA adapter before its first request. Returns why it cannot be used, "" if it can."""
        if self.runner.adapters is None:
            return "this server has no LoRA adapters: start it with --enable-lora, --lora-modules or --lora-dir"
        try:
            self.runner.adapters.load(key, folder)
        except ValueError as error:
            return str(error)
        return ""

    def unload_lora(self, key: str) -> None:
        """Forget a LoRA adapter, unless requests use it."""
        if self.runner.adapters is not None:
            self.runner.adapters.unload(key)

    def start_profile(self) -> str:
        return self.profiler.start()

    def stop_profile(self) -> tuple[str, str]:
        return self.profiler.stop()

    def forget_conversation(self, key: str) -> None:
        """Forget texts of a conversation that are sources of drafts."""
        if self.runner.speculator is not None:
            self.runner.speculator.forget(key)

    def work_idle(self) -> bool:
        """Do one piece of deferred work, some tenths of a second at most, while no step is in flight. Returns whether
        more is left.
        """
        assert self.runner is not None, "initialize first"
        return self.runner.work_idle()

    def look_for_ops(self) -> bool:
        """Switch to faster operations that became available, between two steps or while idle. Returns whether more may
        follow.
        """
        platform = self.runner.platform
        if platform.poll_ops():
            self._change_over()
        return platform.awaits_ops()

    def wants_memory_back(self, idle: float) -> bool:
        """Return whether the KV cache's memory should be given back, after `idle` seconds without a request."""
        return self.runner.platform.wants_memory_back(idle)

    def give_back(self) -> None:
        """Return the KV cache's memory to the system. No block may hold anything that is needed."""
        if self.warmer is not None:
            self.warmer.give_back()
            self.warmer, self.gave_back = None, True

    def encoded(self) -> tuple[float, float]:
        """When the images of the last step that had some were encoded, (begin, end) by time.time(); on a GPU, when that
        was launched.
        """
        return self.runner.images.encoded

    def memory_short(self) -> int:
        """Bytes by which the machine is short of memory. With enough of it, memory is made resident ahead again."""
        short = self.runner.platform.memory_short()
        if self.warmer is not None and -short > self.warmer.most_ahead:
            self.warmer.resume()
        return short

    def give_back_blocks(self, block_ids: list[int]) -> None:
        """Return the memory of these blocks to the system, between two steps, and of those made resident ahead."""
        if self.warmer is not None:
            self.warmer.give_back_blocks(block_ids)

    def describe_ops(self) -> dict[str, object]:
        """The operations in use, the state of faster ones, and since when those are in use (time.time())."""
        platform = self.runner.platform
        return {"name": platform.ops.name, "status": platform.ops_status(), "since": platform.ops_since()}

    def shutdown(self) -> None:
        """Free the memory and leave the process groups. Idempotent."""
        if self.warmer is not None:
            self.warmer.stop()
        if self.tiers is not None:
            self.tiers.stop()
        self.runner = self.warmer = self.tiers = self.slots = self.draft = None
        shutdown_distributed()

    def _agree_on_ops(self, platform: Platform) -> None:
        """Use the platform's faster operations only if all ranks have them now: ranks repeat parts of each other's work
        and must get the same results.
        """
        if self.world_size > 1 and not self._all_reduce_min(int(platform.ops.name != "torch"), platform):
            platform.give_up_ops("not all ranks had them at start")

    def _change_over(self) -> None:
        """Use the native CPU kernels, which were compiled while plain torch served, from the next step on."""
        model, platform = self.runner.model, self.runner.platform
        model.use(platform.ops)
        model.finalize()
        limits = resolve_limits(self.config, model.spec, platform)
        self.runner.backend = limits.attention.backend
        if self.runner.speculator is not None:
            self.runner.speculator.use(limits.speculation)
            if self.runner.speculator.model is not None:
                self.runner.speculator.model.use(platform.ops, limits.attention.backend)
        if limits.deterministic:
            fix_order(model)
        if self.runner.adapters is not None:
            self.runner.adapters.step.fixed_order = limits.deterministic
        value, reason = next(choice[1:] for choice in limits.choices if choice[0] == "deterministic")
        logger.info(
            "%s ready: switched attention backend to %s, deterministic %s (%s)",
            platform.ops_status(),
            self.runner.backend.name,
            value,
            reason,
        )

    def _all_reduce_min(self, num_blocks: int, platform: Platform) -> int:
        """Return the minimum over all ranks: each rank measures its own memory, but block ids are common to all."""
        return self._least([num_blocks], platform)[0]


def _check_streams(target: CausalLM) -> None:
    """Raise ValueError if the model has no hidden states that an EAGLE-3 head could read."""
    if type(target.model).forward is not Decoder.forward:
        raise ValueError(
            f"--speculative-config: method eagle3 is not supported for {target.spec.architecture}: its layers have no "
            "single residual stream"
        )


def _weight_bytes(model: CausalLM | None) -> int:
    if model is None:
        return 0
    return sum(tensor.nbytes for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values())


def _start_warmer(model: nn.Module, weights: int) -> kv_cache.Warmer:
    """Start making the KV cache on CPU resident ahead of use; `weights` are the bytes of the model."""
    ahead = max(WARM_SHARE * weights, MIN_WARM_BYTES)
    return kv_cache.Warmer(
        kv_cache.attention_layers(model), min(kv_cache.IDLE_BYTES, ahead), min(kv_cache.BUSY_BYTES, ahead)
    )
