"""Steps with prompts of several tensor-parallel ranks, replayed in pieces: exchanges are inside the pieces."""

from __future__ import annotations

import pytest
import torch

from quire.worker.cpu.native import KERNELS
from quire.worker.messages import StepOutput
from tests.helpers.worker.ranks import run_ranks
from tests.helpers.worker.steps import Script
from tests.worker.batch.test_mixed_graphs import Pieces
from tests.worker.batch.test_split_step import ranks_of


class RankPieces(Pieces):
    """A graph exchanges without Python's knowledge: what the function counts while it runs again is taken back."""

    def __init__(self, runner):
        super().__init__(runner.model)
        self.group = runner.group

    def _replay(self, function, i, last):
        before = self.group.num_exchanges
        super()._replay(function, i, last)
        self.group.num_exchanges = before


class Ranks:
    """Two ranks of a model; with `pieces` they replay steps with prompts."""

    def __init__(self, folder: str, pieces: bool):
        self.runners = ranks_of(folder, 2)
        self.recorders = [RankPieces(runner) for runner in self.runners]
        if pieces:
            for runner, recorder in zip(self.runners, self.recorders):
                runner.use_graphs(60, lambda function: function, recorder)
                runner.forward.mixed.forward = recorder.forward
                runner.forward._graphs = dict.fromkeys(runner.forward.recordings)
            run_ranks(self._record, 2)

    def _record(self, rank: int) -> None:
        while self.runners[rank].work_idle():
            pass

    def play(self, failing: int | None = None, layer: int = 0) -> list[list[StepOutput]]:
        """Return both ranks' outputs of a few steps. In the second one attention of a layer fails on rank `failing`."""
        script, outputs = Script(4), []
        prompts = [[7 + row + i for i in range(9)] for row in range(3)]

        def run(scheduled: dict[int, int], fails: bool = False) -> None:
            step = script.step(scheduled)
            with pytest.MonkeyPatch.context() as patch:
                if fails:
                    patch.setattr(self.runners[failing].backend, "attend", self._failing(failing, layer))
                outputs.append(run_ranks(lambda rank: self.runners[rank].execute(step).result(), 2))
            script.receive(step, outputs[-1][0])

        for row, prompt in enumerate(prompts):
            script.add(row, prompt)
        run({0: 9})
        run({0: 1, 1: 9, 2: 5}, failing is not None)
        for row in (0, 1):
            script.add(row, prompts[row])
        run({0: 9, 1: 9})
        run({0: 1, 1: 1})
        return outputs

    def _failing(self, rank: int, layer: int):
        attend, calls = self.runners[rank].backend.attend, []

        def fail(call):
            calls.append(call)
            if len(calls) > layer:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return attend(call)

        return fail


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_replayed_and_eager_steps_of_ranks_are_equal(checkpoint, monkeypatch, name):
    monkeypatch.setattr(KERNELS, "lib", None)
    want = Ranks(checkpoint(name), False).play()
    ranks = Ranks(checkpoint(name), True)
    got = ranks.play()
    assert [recorder.num_replays for recorder in ranks.recorders] == [3, 3]
    for some, others in zip(got, want):
        assert [one.token_ids for one in some] == [one.token_ids for one in others]
    mixed = ranks.runners[0].forward.mixed
    exchanges = ranks.runners[0].model.exchanges(16, 16)
    for recorded in mixed._recorded.values():
        assert sum(recorded.num_exchanges) == len(exchanges) and recorded.num_exchanges[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 2])
def test_ranks_fail_a_replayed_step_together(checkpoint, monkeypatch, layer):
    """Attention of one rank runs out of memory between two pieces: the other rank's pieces get what they wait for."""
    monkeypatch.setattr(KERNELS, "lib", None)
    want = Ranks(checkpoint("qwen3"), True).play()
    got = Ranks(checkpoint("qwen3"), True).play(failing=1, layer=layer)
    for rank in (0, 1):
        assert all("out of memory" in got[1][rank].errors[i] for i in range(3)), got[1][rank]
        for after, before in zip(got[2:], want[2:]):
            assert after[rank].token_ids == before[rank].token_ids and not after[rank].errors


def test_a_rank_that_cannot_record_says_so(checkpoint, monkeypatch):
    """The other ranks replay: this one cannot go on eagerly."""
    monkeypatch.setattr(KERNELS, "lib", None)
    ranks = Ranks(checkpoint("qwen3"), False)
    runner = ranks.runners[1]

    def fails(function):
        raise torch.OutOfMemoryError("no room")

    runner.use_graphs(60, lambda function: function, fails)
    with pytest.raises(RuntimeError, match="no CUDA graphs for 48 tokens on rank 1"):
        runner.forward.mixed.record_next()
