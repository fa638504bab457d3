"""One step on the device: apply, prepare, forward, sample, append. Nothing here waits for the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.worker.attention.base import AttentionBackend
from quire.worker.batch.graphs import CudaGraphs, Replay
from quire.worker.batch.input_batch import InputBatch, InputBuffers, SamplingBatch, prepare_inputs
from quire.worker.batch.request_table import RequestTable
from quire.worker.batch.split_step import Failed, Output, SplitOutput, halves
from quire.worker.messages import StepInput, StepOutput, TokenLogprobs
from quire.worker.parallel import tp
from quire.worker.pipeline import SingleStage
from quire.worker.platforms.base import Event, Platform, is_out_of_memory
from quire.worker.platforms.huge_pages import Workspace
from quire.worker.sampling.logprobs import Entries, PromptLogprobs, prompt_messages
from quire.worker.sampling.sampler import RowLogprobs, Sampled, Sampler

logger = logging.getLogger(__name__)

_FORWARD, _LOGITS, _SAMPLING = range(3)  # what a step has reached
_NOT_FINITE = (
    "the logits of this request are not finite, or its constraints (allowed_token_ids, bad_words, min_tokens, "
    "logit_bias) leave no token"
)


@dataclass(slots=True)
class AsyncOutput:
    """A step's results on their way to the host.

    Reading it waits for them; safe in another thread than the one that launches steps.
    """

    step: StepInput
    token_ids: torch.Tensor | None  # [S], None when nothing was sampled
    logprobs: list[RowLogprobs]
    prompt_logprobs: dict[int, tuple[int, list[Entries]]]
    errors: dict[int, str]  # batch position -> what was wrong with the request from the start
    event: Event
    abandoned: torch.Tensor | None = None  # with several ranks: whether one of them had no memory for this step
    failed: bool = False  # for lack of memory; see split_step.py

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self.event.query()

    def result(self) -> StepOutput:
        self.event.synchronize()
        if self.abandoned is not None and bool(self.abandoned):
            return Failed(self.step).result()
        token_ids = self.token_ids.tolist() if self.token_ids is not None else []
        errors = {i: _NOT_FINITE for i, token in zip(self.step.samples, token_ids) if token < 0} | self.errors
        sampled = [[] if i in errors else [token] for i, token in zip(self.step.samples, token_ids)]
        return StepOutput(
            self.step.step, sampled, self._logprobs(errors), prompt_messages(self.prompt_logprobs), errors or None
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
    """Runs `model`, or the stage of it that this rank has, over the request table.

    Its attention layers must be bound to a KV cache of `table.block_size`.
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
    ) -> None:
        self.model, self.table, self.backend, self.platform = model, table, backend, platform
        self.stage = stage or SingleStage()
        self.group = tp()
        # Ranks that work together cannot each cut a step as they like.
        self.alone = self.group.size == 1 and self.stage.first and self.stage.last
        self._reached = _FORWARD
        self.buffers = InputBuffers(
            table.max_num_reqs, max_num_tokens, table.max_blocks, platform.device, len(table.groups)
        )
        self.sampler = sampler or Sampler(table, platform)
        self.prompt_logprobs = PromptLogprobs(table, platform)
        table.register(self.prompt_logprobs)
        self.logits = Workspace(torch.float32)  # of one step; when that is sampled, nothing refers to them any more
        self.forward: Callable[[InputBatch], torch.Tensor] = self.run_eagerly

    @torch.inference_mode()
    def execute(self, step: StepInput) -> Output:
        """Launch `step`; in parts, if memory does not suffice.

        What one request alone causes is reported in the output's `errors`. Only the last stage's output says what was
        sampled.
        """
        self.stage.await_token_ids(step, self.table)
        batch = prepare_inputs(step, self.table, self.buffers, self.platform, self.backend)
        before, self._reached = self.group.num_exchanges, _FORWARD
        try:
            return self._run(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error) or not (self.alone or self._can_abandon(step)):
                raise
            what = "is cut in two" if self.alone else "its requests fail"
            logger.warning("step %d needs more memory than there is, and %s: %s", step.step, what, error)
        # Out here nothing refers to the failed attempt's tensors any more.
        return self._run_halves(step) if self.alone else self._abandon(batch, self.group.num_exchanges - before)

    def _can_abandon(self, step: StepInput) -> bool:
        """Whether the other ranks' part of the step can be brought to an end without this rank's, so that they learn of
        it: not once they may have sampled, nor where they exchange more than is known here (a pipeline, prompt
        logprobs, --debug-check-ranks).
        """
        known = self.stage.first and self.stage.last and type(self.sampler) is Sampler
        return known and self._reached < _SAMPLING and not self.prompt_logprobs.concern(step)

    def _abandon(self, batch: InputBatch, num_done: int) -> Failed:
        """Take part with NaN in what the step still exchanges: from all hidden states being NaN every rank knows that
        the step has failed.
        """
        self.platform.release_memory()
        num_tokens = len(batch.input_ids)
        if self._reached == _FORWARD:
            like = next(tensor for tensor in self.model.parameters() if tensor.is_floating_point())
            num_wanted = num_tokens if batch.needed_rows is None else len(batch.needed_rows)
            for rows in self.model.exchanges(num_tokens, num_wanted)[num_done:]:
                self.group.all_reduce(like.new_full((rows, self.model.spec.hidden_size), float("nan")))
        if batch.step.samples:
            self.model.lm_head.abstain(len(batch.step.samples))
        return Failed(batch.step)

    def _run_halves(self, step: StepInput) -> Output:
        """Once a part has found no memory at all, the parts after it, which may build on what it should have computed,
        are not tried.
        """
        self.platform.release_memory()
        parts = halves(step)
        if parts is None:
            return Failed(step)
        first, second = parts
        output = self.execute(first.step)
        rest = Failed(second.step) if output.failed else self.execute(second.step)
        return SplitOutput(step, [(first, output), (second, rest)], rest.failed)

    def _run(self, batch: InputBatch) -> AsyncOutput:
        step = batch.step
        errors = (
            {i: self.table.errors[row] for i, row in enumerate(step.rows) if row in self.table.errors}
            if self.table.errors
            else {}
        )
        scored = self.prompt_logprobs.concern(step)
        batch.needed_rows = None if scored or not self.stage.last else self._sampled(batch)
        hidden = self.forward(batch)
        self._reached = _LOGITS
        if not self.stage.last:
            self.stage.send_hidden(batch, hidden)
            return AsyncOutput(step, None, [], {}, {}, self.platform.event())
        prompt_logprobs = self.prompt_logprobs.compute(batch, hidden, self.model.logits) if scored else {}
        token_ids, logprobs = None, []
        abandoned = self.platform.to_host(hidden.isnan().all()) if self.group.size > 1 else None
        if step.samples:
            sampled = self._sample(hidden[batch.sampling.logits_indices] if scored else hidden, batch.sampling)
            # The copy starts before the table is written, so that nothing of the next step delays it.
            token_ids, logprobs = self.platform.to_host(sampled.token_ids), sampled.logprobs
            self.table.append(
                batch.sampling.rows_tensor,
                batch.sampling.positions_tensor,
                sampled.token_ids,
                batch.attn[0].max_seq_len,
            )
            self.stage.send_token_ids(sampled.token_ids)
        return AsyncOutput(step, token_ids, logprobs, prompt_logprobs, errors, self.platform.event(), abandoned)

    def _sample(self, hidden: torch.Tensor, sampling: SamplingBatch) -> Sampled:
        token_ids = self.model.largest(hidden) if self.sampler.only_largest(sampling) else None
        if token_ids is not None:
            return Sampled(token_ids, [])
        logits = self.model.logits(hidden, self.logits)
        self._reached = _SAMPLING
        return self.sampler.sample(logits, sampling)

    def _sampled(self, batch: InputBatch) -> torch.Tensor | None:
        """Indices of the tokens whose successor is sampled, None for all; never empty, because kernels take no empty
        batch.
        """
        if len(batch.step.samples) == len(batch.input_ids):  # each token is a request that samples
            return None
        return batch.sampling.logits_indices if batch.step.samples else self.buffers.arange[:1]

    def use_graphs(self, max_model_len: int, record: Callable[[Callable[[], None]], Replay] | None = None) -> None:
        """From now on replay recorded forward passes where every request has one token.

        `record` is for tests without a GPU.
        """
        self.forward = CudaGraphs(self.model, self.run_eagerly, self.buffers, self.backend, max_model_len, record)

    @torch.inference_mode()
    def work_idle(self) -> bool:
        """Do a piece of what was put off until no request is there: record a graph. Whether more is left."""
        return isinstance(self.forward, CudaGraphs) and self.forward.record_next()

    def run_eagerly(self, batch: InputBatch) -> torch.Tensor:
        """Hidden states `[T, H]` of the step's tokens, or those that are needed, after this stage's layers."""
        for meta in batch.attn:
            self.backend.build(meta)
        return self.model(
            batch.input_ids,
            batch.positions,
            batch.attn,
            self.stage.receive_hidden(len(batch.input_ids)),
            batch.needed_rows,
        )
