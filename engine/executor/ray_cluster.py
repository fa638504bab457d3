"""One Ray actor per rank, on any nodes of a cluster with room: for models larger than one machine.

Ray places, starts and watches the processes. Steps travel as arguments of actor calls, which keep their order. The
ranks communicate over NCCL or gloo, as with the other executors.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections import Counter
from operator import attrgetter
from queue import SimpleQueue
from typing import Any

import msgspec

from quire.configs.config import Config
from quire.engine.executor.base import OF_ALL, Executor, Pending, ReportProgress, first_reason
from quire.engine.executor.nodes import use_interface
from quire.worker.messages import StepInput, StepOutput, WorkerReady

try:
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ValueError(
        f"distributed_executor_backend 'ray' needs the package ray ({error}): pip install 'quire[ray]'"
    ) from error

PLACEMENT_TIMEOUT = 60.0  # seconds that the cluster has to provide the resources
POLL_INTERVAL = 0.2  # seconds between polls of the loading progress

_encode = msgspec.msgpack.Encoder().encode
_decode_step = msgspec.msgpack.Decoder(StepInput).decode
_decode_output = msgspec.msgpack.Decoder(StepOutput).decode


def free_port() -> int:
    """Return a port that is unused at every address of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class Rank:
    """The actor of one rank.

    `initialize`, `launch` and `call` run in one thread, in order. `collect` and `watch` have a thread each, so that
    results are awaited while the next step is launched.
    """

    def __init__(self) -> None:
        self._progress = ("starting", 0.0)
        self._launched: SimpleQueue = SimpleQueue()
        self._failure: SimpleQueue = SimpleQueue()

    def address(self) -> tuple[str, str, int]:
        """Return (node id, node address, a free port on the node)."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port()

    def initialize(self, config: bytes, rank: int, world_size: int, init_method: str, local_size: int) -> bytes:
        """Initialize the worker; raises ValueError as the worker does. Ray shows the rank its own GPU only."""
        from quire.worker.worker import Worker

        use_interface(init_method.removeprefix("tcp://").rpartition(":")[0])
        self._worker = Worker(
            msgspec.msgpack.decode(config, type=Config),
            rank,
            world_size,
            init_method,
            local_rank=0,
            local_size=local_size,
        )
        return _encode(self._worker.initialize(self._report_progress))

    def _report_progress(self, phase: str, fraction: float) -> None:
        self._progress = (phase, fraction)

    def progress(self) -> tuple[str, float]:
        return self._progress

    def launch(self, step: bytes, answers: bool) -> None:
        """Start a step.

        On the answering rank the result is kept for `collect`; on the other ranks only its failure matters.
        """
        try:
            output = self._worker.execute(_decode_step(step))
            if answers:
                self._launched.put(output)
            else:
                output.result()
        except BaseException:
            self._failure.put(traceback.format_exc())

    def collect(self) -> bytes:
        """Return the result of the oldest step that was not collected yet."""
        try:
            return _encode(self._launched.get().result())
        except BaseException:
            self._failure.put(traceback.format_exc())
            raise

    def call(self, method: str, *args: Any) -> Any:
        return attrgetter(method)(self._worker)(*args)

    def watch(self) -> str:
        """Block until something fails, and return the traceback."""
        return self._failure.get()


class RayExecutor(Executor):
    """Places the ranks with a placement group and runs every step on all of them. The first rank of the last pipeline
    stage answers.

    Connects to the cluster that RAY_ADDRESS names or that this machine belongs to. If there is none, Ray starts one
    here.
    """

    def __init__(self, config: Config):
        self._config = config
        self._world_size = config.parallel.world_size
        self._answering = self._world_size - config.parallel.tensor_parallel_size
        self._group: PlacementGroup | None = None
        self._ranks: list[Any] = []
        self._watches: list[Any] = []  # one reference per rank, ready when the rank fails or dies
        self._death, self._death_writer = os.pipe()

    def initialize(self, progress: ReportProgress) -> WorkerReady:
        progress("starting", 0.0)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster started here sends no usage reports
        ray.init(logging_level="warning", ignore_reinit_error=True)
        self._place()
        addresses = ray.get([rank.address.remote() for rank in self._ranks])
        init_method = f"tcp://{addresses[0][1]}:{addresses[0][2]}"
        num_on_node = Counter(node for node, *_ in addresses)
        config = _encode(self._config)
        pending = [
            rank.initialize.options(concurrency_group="launch").remote(
                config, i, self._world_size, init_method, num_on_node[addresses[i][0]]
            )
            for i, rank in enumerate(self._ranks)
        ]
        self._watches = [rank.watch.options(concurrency_group="watch").remote() for rank in self._ranks]
        left = list(pending)
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=POLL_INTERVAL)
            self._get(done)  # raise an error at once: the other ranks may wait for this one
            progress(*self._get([self._ranks[0].progress.remote()])[0])
        found = [msgspec.msgpack.decode(ready, type=WorkerReady) for ready in self._get(pending)]
        if len({(ready.num_blocks, ready.block_size, ready.max_model_len) for ready in found}) > 1:
            raise RuntimeError(f"the ranks do not agree on the size of the KV cache: {found}")
        threading.Thread(target=self._watch, name="ray-watch", daemon=True).start()
        return found[0]

    def _place(self) -> None:
        """Reserve one CPU per rank, and one GPU if the cluster has any, on as few nodes as possible, and start the
        actors there.
        """
        has_gpus = self._config.device.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        bundle = {"CPU": 1, "GPU": 1} if has_gpus else {"CPU": 1}
        self._group = placement_group([bundle] * self._world_size, strategy="PACK")
        if not self._group.wait(PLACEMENT_TIMEOUT):
            available = {name: count for name, count in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise ValueError(
                f"the Ray cluster has no room for {self._world_size} ranks of {bundle} each: available {available}"
            )
        actor = ray.remote(concurrency_groups={"launch": 1, "collect": 1, "watch": 1})(Rank)
        environment = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}} if os.environ.get("PYTHONPATH") else {}
        for i in range(self._world_size):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i)
            self._ranks.append(
                actor.options(
                    num_cpus=1,
                    num_gpus=1 if has_gpus else 0,
                    scheduling_strategy=strategy,
                    runtime_env=environment,
                    name=None,
                ).remote()
            )

    def execute(self, step: StepInput) -> Pending:
        message = _encode(step)
        for i, rank in enumerate(self._ranks):
            rank.launch.options(concurrency_group="launch").remote(message, i == self._answering)
        return _Reply(self, self._ranks[self._answering].collect.options(concurrency_group="collect").remote())

    def call(self, method: str, *args: Any) -> Any:
        answers = [rank.call.options(concurrency_group="launch").remote(method, *args) for rank in self._ranks]
        values = self._get(answers)
        return first_reason(values) if method in OF_ALL else values[self._answering]

    def wait(self, reference: Any) -> bytes:
        """Return the value of `reference`. Raises RuntimeError if a rank fails or dies first."""
        done, _ = ray.wait([reference, *self._watches], num_returns=1)
        if done[0] is not reference:
            self._raise_failure(done[0])
        return self._get([reference])[0]

    def _get(self, references: list[Any]) -> list[Any]:
        """Return the values of `references`. Raises ValueError for errors that the user can correct, RuntimeError
        otherwise.
        """
        try:
            return ray.get(references)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise error.cause from None
            raise RuntimeError(f"a worker failed:\n{error}") from None
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"a worker died: {error}") from None

    def _raise_failure(self, watch: Any) -> None:
        rank = self._watches.index(watch)
        try:
            failure = ray.get(watch)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"worker {rank} died: {error}") from None
        raise RuntimeError(f"worker {rank} failed:\n{failure}")

    def _watch(self) -> None:
        """Make the first failure wake an idle engine."""
        ray.wait(self._watches, num_returns=1)
        os.write(self._death_writer, b"x")

    def sentinels(self) -> list[int]:
        return [self._death]

    def kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)

    def shutdown(self) -> None:
        if ray.is_initialized():
            self.kill()
            if self._group is not None:
                remove_placement_group(self._group)
            ray.shutdown()
        self._ranks = []


class _Reply:
    """A step in flight."""

    def __init__(self, executor: RayExecutor, reference: Any):
        self._executor, self._reference = executor, reference

    def result(self) -> StepOutput:
        return _decode_output(self._executor.wait(self._reference))
