"""The worker of one rank: its device, its share of the model, its KV cache and the model runner."""

from __future__ import annotations

import logging

from quire.configs.config import Config
from quire.worker.batch.split_step import Output
from quire.worker.cache import allocation as kv_cache
from quire.worker.cache.tiers.over_cache import open_store
from quire.worker.cache.tiers.remote import RemoteTier
from quire.worker.cache.tiers.slots import SlotTier
from quire.worker.cache.tiers.store import TierStore
from quire.worker.limits import resolve_limits
from quire.worker.messages import StepInput, WorkerReady
from quire.worker.model_runner import ModelRunner
from quire.worker.parallel import shutdown_distributed
from quire.worker.platforms.base import is_out_of_memory
from quire.worker.profiling import StepProfiler
from quire.worker.startup.build import build
from quire.worker.startup.load import Loaded, ReportProgress, load
from quire.worker.startup.plan import measured, plan, promise
from quire.worker.startup.ranks import JoinedRanks
from quire.worker.startup.ready import ready
from quire.worker.startup.resolve import Resolved, resolve
from quire.worker.transformer.pooling import pooling_info

logger = logging.getLogger(__name__)

# the part of the KV cache made resident ahead of use on CPU, as a multiple of the size of the weights: a small model
# should not take a large share of the machine's memory
WARM_SHARE = 8
MIN_WARM_BYTES = 64 << 20


class Worker:
    """A worker whose constructor starts nothing. Call `initialize`, then `execute` any number of steps in order, then
    `shutdown`, from threads of this process.
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
        """Place the rank: `local_size` ranks share this machine, and this one drives GPU `local_rank`; by default all
        ranks are on this machine.
        """
        self.config = config
        device = rank if local_rank is None else local_rank
        num_local = world_size if local_size is None else local_size
        self.ranks = JoinedRanks(config, rank, world_size, init_method or "", device, num_local)
        self.loaded: Loaded | None = None
        self.runner: ModelRunner | None = None
        self.warmer: kv_cache.Warmer | None = None
        self.tiers: TierStore | None = None  # below the KV cache
        self.slots: SlotTier | None = None  # one of them
        self.transfers: RemoteTier | None = None  # another
        self.gave_back = False  # whether the KV cache's memory was given back since the last step
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
        """Run the stages of `worker/startup/` one after another."""
        resolved = resolve(self.config, self.ranks)
        self.loaded = loaded = load(resolved, progress)
        progress("profiling memory", 0.0)
        sizes = measured(resolved, loaded)
        progress("profiling memory", 1.0)
        progress("allocating KV cache", 0.0)
        planned = plan(resolved, sizes, self.ranks)
        promise(resolved, planned)
        self.runner = runner = build(
            resolved,
            loaded,
            planned.num_blocks,
            planned.num_states + planned.num_spares,
            planned.max_model_len,
            planned.num_spares,
            self.config.parallel.debug_check_ranks,
        )
        has_graphs = loaded.one_call and resolved.records_graphs
        records_later = has_graphs and self.config.device.record_graphs != "start"
        if has_graphs:
            runner.use_graphs(planned.max_model_len)
            if not records_later:
                self._record_graphs(progress)
        warms = resolved.platform.shares_ram and not resolved.spec.is_encoder
        if warms and kv_cache.attention_layers(loaded.model):
            self.warmer = _start_warmer(loaded)
        pooling = resolved.pooling
        found = ready(
            resolved,
            planned,
            pooling=None if pooling is None else pooling_info(pooling, loaded.model.pooler, resolved.spec),
            works_idle=records_later or runner.measurement is not None,
            gives_back=self.warmer is not None,
        )
        self._open_tiers(resolved, found)
        progress("allocating KV cache", 1.0)
        return found

    def _open_tiers(self, resolved: Resolved, found: WorkerReady) -> None:
        """Open the tiers below the KV cache."""
        limits, ranks = resolved.limits, self.ranks
        draft = str(limits.speculation.model) if limits.draft else None
        place = (ranks.number, ranks.size, self.config.parallel.tensor_parallel_size)
        self.tiers = open_store(self.config, self.loaded.cached, found, limits.kv, draft, place, ranks.minimum)
        if self.tiers is not None:
            self.slots = next((tier for tier in self.tiers.tiers if isinstance(tier, SlotTier)), None)
            self.transfers = next((tier for tier in self.tiers.tiers if isinstance(tier, RemoteTier)), None)

    def _record_graphs(self, progress: ReportProgress) -> None:
        """Record a graph of every batch size, the largest first."""
        sizes, done = len(self.runner.forward.recordings), 0
        progress("recording CUDA graphs", 0.0)
        while self.runner.work_idle():
            done += 1
            progress("recording CUDA graphs", done / sizes)
        progress("recording CUDA graphs", 1.0)

    def execute(self, step: StepInput) -> Output:
        """Launch a step. Another thread may wait for its result."""
        assert self.runner is not None, "initialize first"
        self.profiler.step()
        self.look_for_ops()
        if step.stores:
            self.tiers.store(step.stores)
        if self.gave_back:
            self.gave_back, self.warmer = False, _start_warmer(self.loaded)
        if self.warmer is None:
            return self.runner.execute(step)
        self.warmer.follow(step)
        try:
            return self.runner.execute(step)
        finally:
            self.warmer.mark_idle()

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

    def prepare_warm_up(self) -> list[str]:
        """Run what no request of the warm-up needs. Returns the keys of blank LoRA adapters, loaded for it."""
        self.runner.sampler.grammars.warm_up()
        if self.runner.adapters is None:
            return []
        keys = [f"warm-up {i}" for i in range(min(2, self.runner.adapters.max_active))]
        for i, key in enumerate(keys):  # with experts steps are not replayed: those of the first one are
            self.runner.adapters.load_blank(key, experts=i > 0)
        return keys

    def start_profile(self) -> str:
        return self.profiler.start()

    def stop_profile(self) -> tuple[str, str]:
        return self.profiler.stop()

    def forget_conversation(self, key: str) -> None:
        """Forget texts of a conversation that are sources of drafts."""
        if self.runner.speculator is not None:
            self.runner.speculator.forget(key)

    def forget_texts(self) -> None:
        """Forget all texts that are sources of drafts."""
        if self.runner.speculator is not None:
            self.runner.speculator.forget_all()

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
        """Return (begin, end), by time.time(), of encoding the images of the last step that had any; on a GPU, of the
        launch.
        """
        return self.runner.images.encoded

    def memory_short(self) -> int:
        """Return bytes by which the machine is short of memory. If it has enough, resume making memory resident ahead
        of use.
        """
        short = self.runner.platform.memory_short()
        if self.warmer is not None and -short > self.warmer.most_ahead:
            self.warmer.resume()
        return short

    def give_back_blocks(self, block_ids: list[int]) -> None:
        """Return to the system, between two steps, the memory of these blocks and of blocks made resident ahead."""
        if self.warmer is not None:
            self.warmer.give_back_blocks(block_ids)

    def describe_ops(self) -> dict[str, object]:
        """Return the operations in use, the state of faster ones, and when faster ones were loaded (time.time())."""
        platform = self.runner.platform
        return {"name": platform.ops.name, "status": platform.ops_status(), "since": platform.ops_since()}

    def shutdown(self) -> None:
        """Free the memory and leave the process groups. Idempotent."""
        if self.warmer is not None:
            self.warmer.stop()
        if self.tiers is not None:
            self.tiers.stop()
        self.runner = self.warmer = self.tiers = self.slots = self.transfers = self.loaded = None
        shutdown_distributed()

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
            platform.fix_order(model)
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


def _start_warmer(loaded: Loaded) -> kv_cache.Warmer:
    """Start making the KV cache on CPU resident ahead of use."""
    ahead = max(WARM_SHARE * loaded.weights, MIN_WARM_BYTES)
    layers = kv_cache.attention_layers(loaded.cached)
    return kv_cache.Warmer(layers, min(kv_cache.IDLE_BYTES, ahead), min(kv_cache.BUSY_BYTES, ahead))
