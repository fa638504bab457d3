"""Run one step on the device: update tables, prepare inputs, forward, sample, append. No code here waits for the
device.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from quire.configs.speculation import MAX_DRAFT
from quire.worker.attention.base import AttentionBackend, GroupedMetadata
from quire.worker.attention.output_window import limit_outputs
from quire.worker.batch.graphs import CudaGraphs, CudaRecorder, Replay
from quire.worker.batch.group_metadata import adapt
from quire.worker.batch.input_batch import InputBatch, InputBuffers, SamplingBatch, prepare_inputs
from quire.worker.batch.mixed_graphs import MixedGraphs, RecordPieces
from quire.worker.batch.piece_sizes import piece_sizes
from quire.worker.batch.request_table import RequestTable
from quire.worker.batch.spare_states import SpareStates
from quire.worker.batch.split_step import STATE_LOST, Failed, Output, Part, SplitOutput, halves, runs, without_drafts
from quire.worker.batch.state_pages import SavedState, StatePages
from quire.worker.cache.allocation import state_layers
from quire.worker.host.huge_pages import Workspace
from quire.worker.images.step_audio import StepAudio
from quire.worker.images.step_images import StepImages
from quire.worker.lora.adapters import Adapters
from quire.worker.messages import NO_TOKEN_ERROR, StepInput, StepOutput, TokenLogprobs
from quire.worker.parallel import tp
from quire.worker.pipeline import SingleStage
from quire.worker.platforms.base import Event, Platform, is_out_of_memory
from quire.worker.sampling.alignments import Alignments
from quire.worker.sampling.logprobs import Entries, PromptLogprobs, prompt_messages
from quire.worker.sampling.pooling import Pooled, Pooling
from quire.worker.sampling.sampler import RowLogprobs, Sampled, Sampler
from quire.worker.sampling.speculation.choice import Speculation
from quire.worker.sampling.speculation.costs import UNKNOWN_SLOPE, StepCosts
from quire.worker.sampling.speculation.draft_model import DraftModel
from quire.worker.sampling.speculation.drafter import ModelDrafter
from quire.worker.sampling.speculation.head import HeadDrafter
from quire.worker.sampling.speculation.measurement import Measurement
from quire.worker.sampling.speculation.speculator import Speculator, accepted
from quire.worker.transformer.decoder import CausalLM

logger = logging.getLogger(__name__)

_FORWARD, _LOGITS, _SAMPLING = range(3)  # phase that a step has reached


@dataclass(slots=True)
class AsyncOutput:
    """A step's results, being copied to the host.

    `result` waits for them; any thread may call it.
    """

    step: StepInput
    token_ids: torch.Tensor | None  # [S], None when nothing was sampled
    logprobs: list[RowLogprobs]
    prompt_logprobs: dict[int, tuple[int, list[Entries]]]
    errors: dict[int, str]  # batch position -> error found when the request was admitted
    event: Event
    abandoned: torch.Tensor | None = None  # with several ranks: whether one of them ran out of memory in this step
    failed: bool = False  # because memory ran out; see split_step.py
    pooled: Pooled | None = None
    speculator: Speculator | None = None
    drafts: dict[int, list[int]] = field(default_factory=dict)  # batch position -> drafts that were verified
    _result: StepOutput | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def done(self) -> bool:
        """Return whether `result` would return at once."""
        return self.event.query()

    def result(self) -> StepOutput:
        with self._lock:
            if self._result is None:
                self._result = self._wait()
        return self._result

    def _wait(self) -> StepOutput:
        self.event.synchronize()
        if self.abandoned is not None and bool(self.abandoned):
            return Failed(self.step).result()
        token_ids = self.token_ids.tolist() if self.token_ids is not None else []
        if self.speculator is not None and (self.speculator.rows or self.drafts):
            return self._verified(self.speculator, token_ids)
        errors = {i: NO_TOKEN_ERROR for i, token in zip(self.step.samples, token_ids) if token < 0} | self.errors
        sampled = [[] if i in errors else [token] for i, token in zip(self.step.samples, token_ids)]
        return StepOutput(
            self.step.step,
            sampled,
            self._logprobs(errors),
            prompt_messages(self.prompt_logprobs),
            errors or None,
            self.pooled and self.pooled.messages(),
        )

    def _verified(self, speculator: Speculator, token_ids: list[int]) -> StepOutput:
        """Return the output of a step that may have verified drafts. With d drafts a request has d + 1 sampling
        rows.
        """
        errors, sampled, firsts, first = dict(self.errors), [], [], 0
        for i in self.step.samples:
            draft = self.drafts.get(i, [])
            tokens = accepted(token_ids[first : first + len(draft) + 1], draft)
            if tokens[0] < 0:
                errors.setdefault(i, NO_TOKEN_ERROR)
            sampled.append([] if i in errors else tokens)
            firsts.append(first)
            first += len(draft) + 1
        logprobs: list[list[TokenLogprobs] | None] | None = None
        if self.logprobs:
            by_row = {j: message for part in self.logprobs for j, message in part.messages().items()}
            logprobs = [
                [message for j in range(first, first + len(tokens)) for message in by_row[j]]
                if tokens and first in by_row
                else None
                for first, tokens in zip(firsts, sampled)
            ]
        num_draft, predicted = speculator.after_step(self.step, self.drafts, sampled)
        return StepOutput(
            self.step.step,
            sampled,
            logprobs,
            prompt_messages(self.prompt_logprobs),
            errors or None,
            self.pooled and self.pooled.messages(),
            num_draft or None,
            predicted or None,
        )

    def _logprobs(self, errors: dict[int, str]) -> list[list[TokenLogprobs] | None] | None:
        if not self.logprobs:
            return None
        merged: list[list[TokenLogprobs] | None] = [None] * len(self.step.samples)
        for part in self.logprobs:
            for j, messages in part.messages().items():
                merged[j] = messages if self.step.samples[j] not in errors else None
        return merged


class ModelRunner:
    """Runs `model`, or the pipeline stage of it that this rank holds, over the request table.

    Its attention layers must be bound to a KV cache with blocks of `table.block_size` tokens.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        table: RequestTable,
        backend: AttentionBackend,
        platform: Platform,
        max_num_tokens: int,
        stage: SingleStage | None = None,
        sampler: Sampler | None = None,
        speculation: Speculation | None = None,
        adapters: Adapters | None = None,
        draft: CausalLM | None = None,
        num_spares: int = 0,
    ) -> None:
        self.model, self.table, self.backend, self.platform = model, table, backend, platform
        self.stage = stage or SingleStage()
        self.group = tp()
        # Ranks that communicate cannot each split a step on their own.
        self.alone = self.group.size == 1 and self.stage.first and self.stage.last
        self._reached = _FORWARD
        self.buffers = InputBuffers(
            table.max_num_reqs, max_num_tokens, table.max_blocks, platform.device, len(table.groups)
        )
        self.states = StatePages(model, table)
        self.spare_states = None
        if num_spares:
            num_pages = len(state_layers(model)[0].pages[0])
            self.spare_states = SpareStates(model, table, num_pages - num_spares, num_spares)
        self.sampler = sampler or Sampler(table, platform)
        self.measurement: Measurement | None = None  # for the costs of drafts
        self._unsettled: deque[Output] = deque()  # steps whose tokens the speculator may not have seen
        self.speculator = None
        if speculation is not None and self.stage.last:
            drafting: ModelDrafter | None = None
            needs = table, backend, platform, max_num_tokens, self.sampler
            if speculation.heads or speculation.eagle:
                drafting = HeadDrafter(model, draft, *needs)
            elif draft is not None:
                drafting = DraftModel(draft, *needs, model)
            most = num_spares if table.has_states else MAX_DRAFT * table.max_num_reqs
            num_slots = None if self.stage.first else table.num_slots
            costs = StepCosts(UNKNOWN_SLOPE) if platform.overlaps else StepCosts()
            self.speculator = Speculator(
                speculation, self.sampler.grammars, most, drafting, num_slots, costs, table.num_tokens
            )
            table.register(self.speculator)
            if self.alone and speculation.adapts and table.has_states == (self.spare_states is not None):
                most = min(table.max_num_reqs, max_num_tokens)
                page = self.spare_states.pages[0] + table.first_state if self.spare_states else 0
                measure = functools.partial(Measurement, apart=True) if platform.overlaps else Measurement
                self.measurement = measure(self._run_alone, costs, table, most, page)
        self.prompt_logprobs = PromptLogprobs(table, platform)
        table.register(self.prompt_logprobs)
        self.shares_outputs = all(group.shares_outputs for group in table.groups)
        steps = StepAudio if model.spec.crosses else StepImages
        self.images = steps(model, table, platform, self.stage) if model.spec.vision is not None else None
        self.pooling: Pooling | Alignments = (
            Alignments(table, platform, model, self.images.rows)
            if model.spec.crosses
            else Pooling(table, platform, model)
        )
        table.register(self.pooling)
        self.adapters = adapters
        if adapters is not None:
            table.register(adapters)
        self.logits = Workspace(torch.float32)  # logits of one step; no tensor refers to them after sampling
        self.forward: Callable[..., torch.Tensor] = self.run_eagerly  # (batch, adapted)

    @torch.inference_mode()
    def execute(self, step: StepInput) -> Output:
        """Launch `step`, in parts if memory runs out.

        Errors of single requests are reported in the output's `errors`. Only the last stage's output contains sampled
        tokens.
        """
        if self.speculator is None:
            return self._execute(step, None)
        self._settle(step)
        output = self._execute(step, None)
        self._unsettled.append(output)
        if not self.stage.first:
            output.result()
            self.speculator.make_drafts(step)
            self.stage.send_drafts(self.speculator.proposed(step))
        return output

    def _settle(self, step: StepInput) -> None:
        """Wait for the results of earlier steps, so that the speculator sees their tokens: on a rank that does not
        report results, no other code may have waited yet. The last step's may follow later if `step` does not depend on
        them, so that its launch overlaps with that step on a GPU.
        """
        may_overlap = self.platform.overlaps and not self.speculator.waits(step)
        while len(self._unsettled) > may_overlap:
            self._unsettled.popleft().result()

    def _execute(self, step: StepInput, saved: SavedState | None) -> Output:
        """Execute a part. `saved` is the state of its single request, if the part updates it in place."""
        self.stage.await_token_ids(step, self.table)
        make_drafts = None
        if step.num_draft and (self.stage.first or self.stage.last):
            make_drafts = functools.partial((self.speculator or self.stage).drafts, step)
        padded = self.forward.padded_size(step) if isinstance(self.forward, CudaGraphs) else 0
        batch = prepare_inputs(step, self.table, self.buffers, self.platform, self.backend, make_drafts, padded)
        if self.states.group is not None:
            spares = self.spare_states.begin(batch) if batch.drafts and self.spare_states is not None else {}
            self.states.leave(batch.attn, step, spares)
        if not self.shares_outputs:
            num_prompt = [self.table.num_prompt_tokens[row] for row in step.rows]
            limit_outputs(batch.attn, self.table.groups, step.num_computed, step.num_scheduled, num_prompt)
        if self.images is not None:
            self.images.encode(step)
            self.images.prepare(batch)
        before, self._reached = self.group.num_exchanges, _FORWARD
        try:
            return self._run(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error) or not (self.alone or self._can_abandon(step)):
                raise
            action = "retrying in two halves" if self.alone else f"failing its {len(step.rows)} requests"
            logger.warning("out of memory in step %d: %s: %s", step.step, action, error)
        # Outside the except block no frame refers to the failed attempt's tensors.
        return self._run_halves(step, saved) if self.alone else self._abandon(batch, self.group.num_exchanges - before)

    def _can_abandon(self, step: StepInput) -> bool:
        """Return whether this rank can drop the step and still finish the other ranks' exchanges, so that they learn of
        the failure.

        False once the other ranks may have sampled, and if they exchange more than `_abandon` knows of (a pipeline,
        prompt logprobs, alignments, --debug-check-ranks).
        """
        known = self.stage.first and self.stage.last and type(self.sampler) is Sampler
        exchanges = self.prompt_logprobs.needed(step) or (self.model.spec.crosses and self.pooling.needed(step))
        return known and self._reached < _SAMPLING and not exchanges

    def _abandon(self, batch: InputBatch, num_done: int) -> Failed:
        """Send NaN in the remaining exchanges of the step: a rank whose hidden states are all NaN concludes that the
        step failed.
        """
        self.platform.release_memory()
        num_tokens = len(batch.input_ids)
        if self._reached == _FORWARD:
            like = torch.empty(0, dtype=self.model.dtype, device=self.platform.device)
            num_needed = num_tokens if batch.needed_rows is None else len(batch.needed_rows)
            if isinstance(self.forward, CudaGraphs) and (padded := self.forward.num_rows(batch)):
                num_tokens = num_needed = padded  # those that the other ranks exchange
            for shape, dtype in self.model.exchanges(num_tokens, num_needed)[num_done:]:
                self.group.all_reduce(like.new_full(shape, float("nan"), dtype=dtype))
        if batch.step.samples:
            self.model.lm_head.abstain(len(batch.sampling.rows))
        return Failed(batch.step)

    def _run_halves(self, step: StepInput, saved: SavedState | None) -> Output:
        """Run a step in two halves. If a part fails for lack of memory, skip the later parts: they may read what it
        should have computed.
        """
        self.platform.release_memory()
        if saved is not None:
            saved.restore()
        elif any(lost := self.states.in_place(step.rows)):
            return self._without_lost(step, lost)
        if step.num_draft:
            whole = without_drafts(step)
            output = self._execute(whole.step, saved)
            return SplitOutput(step, [(whole, output)], output.failed)
        uncut = self.images.uncut(step) if self.images is not None else []
        parts = halves(step, whole_prompts=self.model.spec.is_encoder, uncut=uncut)
        if parts is None:
            return Failed(step)
        first, second = parts
        output = self._execute(first.step, saved)
        rest = Failed(second.step) if output.failed else self._run_second(second, of_same=len(step.rows) == 1)
        return SplitOutput(step, [(first, output), (second, rest)], rest.failed)

    def _run_second(self, half: Part, of_same: bool) -> Output:
        """Run the second half; `of_same`: it continues the state of the first half's request."""
        try:
            saved = self.states.advance(half.step.rows[0], half.checkpoint) if of_same else None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return Failed(half.step)
        return self._execute(half.step, saved)

    def _without_lost(self, step: StepInput, lost: list[bool]) -> Output:
        """Fail the requests whose state the failed attempt may have updated in place, and run the others.

        A request that reads keys and values which a failed one should have written is recomputed by the scheduler.
        """
        parts = [
            (part, Failed(part.step, message=STATE_LOST) if failed else self._execute(part.step, None))
            for failed, part in runs(step, lost)
        ]
        return SplitOutput(step, parts, failed=True)

    def _run(self, batch: InputBatch) -> AsyncOutput:
        step, begin = batch.step, time.process_time()
        errors = (
            {i: self.table.errors[row] for i, row in enumerate(step.rows) if row in self.table.errors}
            if self.table.errors
            else {}
        )
        if self.images is not None:
            errors |= self.images.errors(step)
        scored, pools = self.prompt_logprobs.needed(step), self.pooling.needed(step)
        if pools and self.model.spec.crosses:
            batch.cross_weights = self.pooling.weights(batch)
        keeps_all = scored or pools or (self.speculator is not None and self.speculator.needs_hidden)
        if self.stage.last and step.samples:
            self.sampler.grammars.begin(batch.sampling)
        batch.needed_rows = None if keeps_all or not self.stage.last else self._sampled_rows(batch)
        adapted = self.adapters is not None and self.adapters.begin(step, batch)
        hidden = self.forward(batch, True) if adapted else self.forward(batch)
        errors |= self.model.failures
        self._reached = _LOGITS
        if not self.stage.last:
            self.stage.send_hidden(batch, hidden)
            return AsyncOutput(step, None, [], {}, {}, self.platform.event())
        prompt_logprobs = self.prompt_logprobs.compute(batch, hidden, self.model.logits) if scored else {}
        pooled = self.pooling.compute(batch, hidden) if pools else None
        token_ids, logprobs = None, []
        abandoned = self.platform.to_host(hidden.isnan().all()) if self.group.size > 1 else None
        if step.samples:
            sampled = self._sample(hidden[batch.sampling.logits_indices] if keeps_all else hidden, batch.sampling)
            # Start the copy before writing the table, so that work of the next step does not delay it.
            token_ids, logprobs = self.platform.to_host(sampled.token_ids), sampled.logprobs
            errors |= self._sampling_errors(batch, sampled) if sampled.errors else {}
            if not sampled.appended:
                rows = batch.sampling.rows_tensor, batch.sampling.positions_tensor
                self.table.append(*rows, sampled.token_ids, batch.max_seq_len)
            self.stage.send_token_ids(sampled.token_ids)
            if batch.drafts and self.spare_states is not None:
                self.spare_states.keep(batch, sampled.token_ids, self.platform)
        if self.speculator is not None:
            observes = self.alone and not self.platform.overlaps  # ranks must decide alike; a launch is no step
            if observes and len(batch.sampling.rows) == len(batch.input_ids):
                self.speculator.costs.observe(len(batch.input_ids), time.process_time() - begin)
            self.speculator.follow(batch, hidden)
        event = self.platform.event()
        if token_ids is not None:
            self.sampler.grammars.sampled(batch.sampling, token_ids, event)
        if pools:
            self.pooling.commit()
        return AsyncOutput(
            step,
            token_ids,
            logprobs,
            prompt_logprobs,
            errors,
            event,
            abandoned,
            pooled=pooled,
            speculator=self.speculator,
            drafts=batch.drafts,
        )

    def _sampling_errors(self, batch: InputBatch, sampled: Sampled) -> dict[int, str]:
        """Return the sampler's errors by batch position; it names the first sampling row of a request."""
        position, j = {}, 0
        for i in batch.step.samples:
            position[j] = i
            j += 1 + len(batch.sampling.drafts.get(j, ()))
        return {position[j]: message for j, message in sampled.errors.items()}

    def _sample(self, hidden: torch.Tensor, sampling: SamplingBatch) -> Sampled:
        token_ids = self.model.largest(hidden) if self.sampler.only_argmax(sampling) else None
        if token_ids is not None:
            return Sampled(token_ids, [])
        logits = self.model.rounded_logits(hidden) if self.sampler.takes_rounded(sampling) else None
        if logits is None:
            logits = self.model.logits(hidden, self.logits)
        self._reached = _SAMPLING
        return self.sampler.sample(logits, sampling)

    def _sampled_rows(self, batch: InputBatch) -> torch.Tensor | None:
        """Return the indices of the tokens whose successor is sampled, or None for all tokens. Never empty, because
        kernels take no empty batch.
        """
        if len(batch.sampling.rows) == len(batch.input_ids):  # every token is a request that samples
            return None
        return batch.sampling.logits_indices if batch.step.samples else self.buffers.arange[:1]

    def use_graphs(
        self,
        max_model_len: int,
        record: Callable[[Callable[[], None]], Replay] | None = None,
        record_pieces: RecordPieces | None = None,
    ) -> None:
        """Replay recorded forward passes in later steps where every request has one token, and in those of few tokens.
        Tests without a GPU replace the CUDA recorder by `record` and `record_pieces`; None records no pieces.
        """
        self.model.model.keep_captured(self.buffers.max_num_tokens)
        if record is None:
            record = CudaRecorder()
            record_pieces = record.pieces
        mixed = None
        if record_pieces is not None and MixedGraphs.applies(self.table.groups):
            needs = self.model, self.buffers, self.backend, max_model_len, record_pieces
            sizes = piece_sizes(self.model.spec, self.buffers.max_num_tokens, self.group.size)
            mixed = MixedGraphs(*needs, sizes, self.group)
        shared = self.buffers, self.backend, max_model_len, record, self._adapt, self.adapters
        self.forward = CudaGraphs(self.model, self.run_eagerly, *shared, mixed)

    def _adapt(self, attn: GroupedMetadata) -> GroupedMetadata:
        return adapt(attn, self.table.groups, self.table.block_size, self.platform.to_device)

    @torch.inference_mode()
    def work_idle(self) -> bool:
        """Record one graph, or measure the time of one step, while no request runs. Returns whether more are left."""
        if isinstance(self.forward, CudaGraphs) and self.forward.record_next():
            return True
        return self.measurement is not None and self.measurement.measure_next()

    def _run_alone(self, step: StepInput) -> None:
        """Run a step and discard its results."""
        self.execute(step).result()

    def run_eagerly(self, batch: InputBatch, adapted: bool = False) -> torch.Tensor:
        """Return hidden states `[T, H]` of the step's tokens, or of `needed_rows`, after this stage's layers;
        `adapted`: some rows have LoRA adapters.
        """
        if adapted:
            self.adapters.place_rows(batch)
        if self.model.spec.is_encoder:
            types = {"token_types": self.pooling.token_types(batch)} if self.model.spec.num_token_types > 1 else {}
            return self.model(batch.input_ids, batch.positions, batch.attn, None, batch.needed_rows, **types)
        for meta in batch.attn:
            meta.backend.build(meta)
        return self.model(
            batch.input_ids,
            batch.positions,
            batch.attn,
            self.stage.receive_hidden(len(batch.input_ids)),
            batch.needed_rows,
            **({} if batch.images is None else {"images": batch.images}),
            **({} if batch.encoded is None else {"encoded": batch.encoded}),
            **({} if batch.cross_weights is None else {"cross_weights": batch.cross_weights}),
        )
