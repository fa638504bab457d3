"""Speculative decoding: which draft tokens each row's next step verifies, and which of them were right.

After a step, drafters propose the tokens that may follow (`after_step`); the engine learns only their number. The next
step computes them together with the row's last token, and samples after each of them with the same random numbers as
without drafts: position p's token is a function of the logits there, the seed and p. So drafts that equal the tokens
sampled at their positions are the output itself, and one more token comes free (`accepted`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from quire.configs.speculation import MAX_DRAFT
from quire.worker.batch.input_batch import InputBatch
from quire.worker.messages import NewRequest, StepInput
from quire.worker.sampling.grammar import GrammarRows
from quire.worker.sampling.speculation.choice import ADAPTIVE_MAX, STEP_DRAFTS, Speculation
from quire.worker.sampling.speculation.costs import Odds, Plan, StepCosts
from quire.worker.sampling.speculation.drafter import Drafter, History, ModelDrafter
from quire.worker.sampling.speculation.earlier import MAX_TOKENS, EarlierTexts, Progress
from quire.worker.sampling.speculation.forced import GrammarDrafter
from quire.worker.sampling.speculation.lookup import EarlierDrafter, LookupDrafter, PredictionDrafter

_NOT_YET = -1  # a draft that the draft model will make
_FIRST_LENGTH = 4  # drafts of a request before any was verified
_KEPT_AT_ONCE = 256  # new tokens of a running request after which other requests may draft from them
_MEMORY = 0.98  # decay, per draft, of the odds of other requests' drafts
_MAX_PAUSE = 32  # steps without drafts after drafts that were wrong again and again


def accepted(token_ids: list[int], draft: list[int]) -> list[int]:
    """Return the new tokens of a row, from those sampled after its last token and after each draft.

    A draft is accepted if it is the token sampled before it; the token sampled after the last accepted one is new, too.
    -1, for a position at which no token can be sampled, is left to the next step, unless it is the first.
    """
    num = num_accepted(token_ids, draft)
    return token_ids[:num] if num and token_ids[num] < 0 else token_ids[: num + 1]


def num_accepted(token_ids: list[int], draft: list[int]) -> int:
    """Return how many leading tokens of a draft equal those sampled at their positions."""
    num = 0
    while num < len(draft) and token_ids[num] == draft[num]:
        num += 1
    return num


@dataclass(slots=True)
class _Row:
    """A request's drafts and their gain."""

    history: History
    draft: list[int]
    is_prediction: bool = False
    by_model: bool = False  # `draft` is made when it is verified: until then only its length is right
    length: int = _FIRST_LENGTH  # for the next draft, when it adapts
    pause: int = 0  # steps until the next draft
    num_wrong: int = 0  # drafts in a row of which no token was right
    source: object = None  # for the draft
    odds: dict[object, Odds] = field(default_factory=dict)  # by source
    kept: Progress = field(default_factory=Progress)  # of its text, by `EarlierTexts`

    def learn(self, num_draft: int, num_accepted: int) -> None:
        """Adapt to a draft of which `num_accepted` tokens were right."""
        self.odds[self.source].learn(num_draft, num_accepted)
        if num_accepted == num_draft:
            self.length = min(2 * self.length, ADAPTIVE_MAX)
        else:
            self.length = max(num_accepted + 1, 2)
        self.num_wrong = 0 if num_accepted else self.num_wrong + 1
        self.pause = min(2**self.num_wrong - 2, _MAX_PAUSE) if self.num_wrong else 0


class Speculator:
    """A `RowState`. `after_step` sees the tokens of steps in their order, and those before a step that `waits` for them
    before that one begins.
    """

    def __init__(
        self,
        speculation: Speculation,
        grammars: GrammarRows,
        most: int,
        model: ModelDrafter | None = None,
        num_slots: Callable[[int], int] | None = None,
        costs: StepCosts | None = None,
        capacity: int = MAX_TOKENS,
    ) -> None:
        """Prepare for steps that may verify `most` drafts. `num_slots`, of a row's tokens, is given if `make_drafts`
        will be called: then drafts of `model` must fit into the blocks that a row has. `capacity` are the tokens of
        the prefix cache.
        """
        self.grammars, self.most, self.model, self.num_slots = grammars, most, model, num_slots
        self.costs = costs or StepCosts()
        self.earlier = EarlierTexts(capacity)
        self.rows: dict[int, _Row] = {}
        self.use(speculation)

    def use(self, speculation: Speculation) -> None:
        """Draft by these settings from now on."""
        self.speculation = speculation
        self.drafters: list[Drafter] = []
        if speculation.prediction:
            self.drafters.append(PredictionDrafter())
        if speculation.grammar:
            self.drafters.append(GrammarDrafter(self.grammars, guess=speculation.lookup is not None))
        if speculation.lookup is not None:
            own = LookupDrafter(*speculation.lookup, speculation.by_match)
            self.drafters += [EarlierDrafter(self.earlier, own), own] if speculation.earlier else [own]

    def add(self, row: int, new: NewRequest) -> None:
        sampling, speculation = new.sampling, self.speculation
        may_draft = (
            speculation.lookup is not None
            or self.model is not None
            or (speculation.grammar and sampling.grammar)
            or (speculation.prediction and sampling.prediction)
        )
        if sampling.speculation and sampling.max_tokens > 1 and may_draft:
            for other in self.rows.values():  # rows whose requests have ended are among them
                if other.history.scope == new.scope:
                    self._keep(other, least=32)
            self.rows[row] = _Row(History(new), [])

    def remove(self, row: int) -> None:
        if (ended := self.rows.pop(row, None)) is not None:
            self._keep(ended)

    def _keep(self, row: _Row, least: int = 1) -> None:
        """Let later requests of the same scope find the text of a row that has `least` new tokens."""
        history = row.history
        if self.speculation.lookup is None or not self.speculation.earlier or history.scope is None:
            return
        if history.size - row.kept.size >= least:
            self.earlier.add(history.scope, history.conversation, history.tokens, row.kept)

    def forget(self, key: str) -> None:
        """Forget a conversation (`AddRequest.cache_key`)."""
        self.earlier.forget(key)
        for row in self.rows.values():
            if row.history.conversation == key:
                row.history.forget()

    def forget_all(self) -> None:
        """Forget all texts, those of running requests included."""
        self.earlier.clear()
        for row in self.rows.values():
            row.history.forget()

    def waits(self, step: StepInput) -> bool:
        """Return whether `step` must not begin before all tokens are known: it verifies drafts, gives rows to other
        requests, or advances grammars, which limit the drafts.
        """
        rows = (self.rows.get(row) for row in step.rows)
        return bool(step.new or step.num_draft) or any(row.history.has_grammar for row in rows if row is not None)

    def drafts(self, step: StepInput) -> dict[int, list[int]]:
        """Return batch position -> the drafts that `step`, whose tables are up to date, verifies."""
        rows = {i: self.rows[step.rows[i]] for i in step.num_draft}
        if counts := {i: step.num_draft[i] for i, row in rows.items() if row.draft[0] == _NOT_YET}:
            for i, draft in self.model.draft(step, counts).items():
                rows[i].draft = draft
        return {i: row.draft[: step.num_draft[i]] for i, row in rows.items()}

    def make_drafts(self, step: StepInput) -> None:
        """Let the drafting model make the drafts for the next step of each sampling row of `step`, after its
        `after_step`.
        """
        made = [step.rows[i] for i in step.samples if step.rows[i] in self.rows]
        made = [row for row in made if self.rows[row].draft[:1] == [_NOT_YET]]
        if not made:
            return
        known = [len(self.rows[row].history.tokens) for row in made]
        counts = {i: len(self.rows[row].draft) for i, row in enumerate(made)}
        ahead = StepInput(
            step.step,
            [],
            made,
            [count - 1 for count in known],
            [1 + count for count in counts.values()],
            [[] for _ in made],
            list(counts),
            num_draft=counts,
        )
        for i, draft in self.model.draft(ahead, counts).items():
            self.rows[made[i]].draft = draft

    @property
    def needs_hidden(self) -> bool:
        """Return whether `follow` reads the hidden states of all tokens."""
        return self.model is not None and self.model.needs_hidden

    def follow(self, batch: InputBatch, hidden: torch.Tensor) -> None:
        """Let the drafting model take the tokens of a step, whose successors are in the token table."""
        if self.model is not None:
            num_draft = batch.step.num_draft
            by_model = (i for i in num_draft if self.rows[batch.step.rows[i]].by_model)
            self.model.follow(batch, hidden, {i: num_draft[i] for i in by_model})

    def proposed(self, step: StepInput) -> list[list[int]]:
        """Return the drafts for the next step of each sampling row of `step`, after its `after_step`."""
        rows = (self.rows.get(step.rows[i]) for i in step.samples)
        return [row.draft if row is not None else [] for row in rows]

    def after_step(
        self, step: StepInput, verified: dict[int, list[int]], token_ids: list[list[int]]
    ) -> tuple[dict[int, int], list[int]]:
        """Take the new tokens of each sampling row of `step`, and propose drafts for its next step.

        Returns the number of drafts by batch position, and the positions whose drafts are of the request's prediction.
        """
        num_draft: dict[int, int] = {}
        predicted: list[int] = []
        plan = Plan(self.costs, len(step.samples)) if self.speculation.num_draft is None else None
        mine: dict[int, _Row] = {}
        for i, ids in zip(step.samples, token_ids):
            row = self.rows.get(step.rows[i])
            if row is None or not ids:
                continue
            if i in verified:
                row.learn(len(verified[i]), len(ids) - 1)
                odds = self.earlier.odds(row.history.scope, type(row.source))
                odds.learn(len(verified[i]), len(ids) - 1, _MEMORY)
            row.history.add(ids)
            self._keep(row, least=_KEPT_AT_ONCE)
            mine[i] = row
        self._prepare({step.rows[i]: row for i, row in mine.items() if row.history.has_grammar}, plan)
        for i, row in mine.items():
            row.draft = self._propose(step.rows[i], row, plan, self.most - sum(num_draft.values()))
            if row.draft:
                num_draft[i] = len(row.draft)
                if row.is_prediction:
                    predicted.append(i)
        return num_draft, predicted

    def _prepare(self, rows: dict[int, _Row], plan: Plan | None) -> None:
        """Ask the grammars of rows for forced tokens, where drafts of them may pay."""
        num = self.speculation.num_draft
        for drafter in self.drafters:
            if not isinstance(drafter, GrammarDrafter):
                continue
            limits = {}
            for number, row in rows.items():
                limit = min(num or min(row.length, STEP_DRAFTS), MAX_DRAFT)
                if plan is None or (not row.pause and self._may_pay(row, drafter, limit, plan)):
                    limits[number] = limit
            drafter.prepare(limits)

    def _propose(self, number: int, row: _Row, plan: Plan | None, room: int) -> list[int]:
        """Return drafts of the first source whose drafts pay; without a plan all do."""
        limit = self.speculation.num_draft
        if plan is not None:
            if row.pause:
                row.pause -= 1
                return []
            limit = min(row.length, STEP_DRAFTS - plan.num_drafts)
        limit = min(limit, MAX_DRAFT, room)
        if limit <= 0:
            return []
        for drafter in self.drafters:
            if not self._may_pay(row, drafter, limit, plan):
                self._odds(row, drafter).forget()
                continue
            draft = drafter.propose(number, row.history, limit)
            if draft and row.history.has_grammar and not isinstance(drafter, GrammarDrafter):
                draft = self.grammars.allowed(number, draft, limit)
            if draft and (draft := self._paying(row, drafter, draft, plan)):
                row.is_prediction, row.by_model = isinstance(drafter, PredictionDrafter), False
                return draft
        row.is_prediction, row.by_model = False, self.model is not None
        if self.model is None:
            return []
        if self.num_slots is not None:
            limit = min(limit, max(self.num_slots(number) - len(row.history.tokens), 0))
        return self._paying(row, self.model, [_NOT_YET] * limit, plan)

    def _odds(self, row: _Row, source: object) -> Odds:
        if (odds := row.odds.get(source)) is None:
            odds = row.odds[source] = self.earlier.odds(row.history.scope, type(source)).beginning()
        return odds

    def _may_pay(self, row: _Row, source: object, limit: int, plan: Plan | None) -> bool:
        """Return whether drafts of a source are worth looking for. `_paying` decides on those that are found."""
        if plan is None:
            return True
        return self._odds(row, source).probability > plan.least_odds(limit, getattr(source, "cost", 0.0))

    def _paying(self, row: _Row, source: object, draft: list[int], plan: Plan | None) -> list[int]:
        """Return the beginning of a draft that is expected to pay."""
        row.source, odds = source, self._odds(row, source)
        if plan is None:
            return draft
        number = plan.take(odds.probability, len(draft), getattr(source, "cost", 0.0))
        if not number:
            odds.forget()
        return draft[:number]
