"""Compares the drafts of a draft model, or of a head, with those of a torch twin."""

from __future__ import annotations

from typing import Protocol

import msgspec

from quire.worker.messages import SamplingParams

Seen = list[tuple[list[int], list[int]]]  # (known tokens of a request, the drafts after them)


class Twin(Protocol):
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the drafts that follow `tokens`, whose last one the model has not computed."""


def check_drafts(engine, twin: Twin | None, vocab_size: int) -> None:
    """Check that the drafts of `engine` are the twin's, if there is one, and that tokens are those without drafts."""
    seen = record(engine.executor._worker.runner.speculator.model)
    prompts = [[3, 9, 7, 4] * 9, [(7 * i) % (vocab_size - 8) + 4 for i in range(23)], [5, 6], [3, 9, 7, 4] * 8]
    greedy, random = (SamplingParams(temperature=t, seed=4, max_tokens=12, ignore_eos=True) for t in (0.0, 0.7))
    plain = [engine.generate(prompts, msgspec.structs.replace(one, speculation=False)) for one in (greedy, random)]
    engine.scheduler.contents.reset_prefix_cache()
    assert [one.token_ids for one in engine.generate(prompts, greedy)] == [one.token_ids for one in plain[0]]
    assert len(seen) > 20
    for tokens, draft in seen[::4]:
        assert twin is None or draft == twin.drafts(tokens, len(draft))
    assert [one.token_ids for one in engine.generate(prompts, random)] == [one.token_ids for one in plain[1]]


def record(drafter) -> Seen:
    """Return a list to which each draft is added from now on."""
    make, seen = drafter.draft, []

    def record(step, counts):
        drafts = make(step, counts)
        for i, draft in drafts.items():
            known = step.num_computed[i] + 1
            seen.append((drafter.table.token_table[step.rows[i], :known].tolist(), draft))
        return drafts

    drafter.draft = record
    return seen
