"""The samplers of llama.cpp, each a function that drops or scales candidates.

Every sum is one of integers, as in `sampling/arithmetic.py`: exact in any order, so that a row's tokens depend neither
on the other rows of its batch nor on the device's order of reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields

import torch

EXCLUDED = float("-inf")
_SCALE = float(1 << 40)  # for probabilities and entropies
_LOGIT_SCALE = float(1 << 24)  # for logits and their squares, in `top_n_sigma`
_MIROSTAT_TOKENS = 100  # from which mirostat estimates the slope of the distribution (`m` in the paper)


@dataclass(slots=True)
class Columns:
    """The parameters of n rows, float64 `[n, 1]` on the device; `uniform` picks whether XTC acts, `mu` is mirostat's
    state.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor
    top_n_sigma: torch.Tensor
    xtc_probability: torch.Tensor
    xtc_threshold: torch.Tensor
    dynatemp_range: torch.Tensor
    dynatemp_exponent: torch.Tensor
    min_keep: torch.Tensor
    mirostat_tau: torch.Tensor
    mirostat_eta: torch.Tensor
    uniform: torch.Tensor | None = None
    mu: torch.Tensor | None = None


PARAMETERS = tuple(one.name for one in fields(Columns) if one.default is MISSING)  # those that the request sets


class Candidates:
    """The tokens that samplers have left in n rows: logits `[n, K]` float32, -inf if dropped, in descending order with
    their `ids` once a sampler needed an order, else of all tokens by id.
    """

    def __init__(self, logits: torch.Tensor):
        self.logits, self.ids = logits, None
        self._vocab_size = logits.shape[1]

    def sort(self, most: int = 0) -> None:
        """Sort and keep the `most` largest; 0 keeps all."""
        size = self.logits.shape[1]
        most = min(most or size, size)
        if self.ids is None:
            self.logits, self.ids = self.logits.topk(most) if most < size else self._sorted(self.logits)
            return
        self.logits, order = self._sorted(self.logits)
        self.logits, self.ids = self.logits[:, :most], self.ids.gather(1, order)[:, :most]

    @staticmethod
    def _sorted(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.sort(dim=1, descending=True, stable=True)

    def restore(self) -> torch.Tensor:
        """Return the logits `[n, V]` by token id, and continue with them."""
        if self.ids is not None:
            full = self.logits.new_full((len(self.logits), self._vocab_size), EXCLUDED)
            self.logits, self.ids = full.scatter_(1, self.ids, self.logits), None
        return self.logits

    def keep(self, kept: torch.Tensor) -> None:
        """Drop the candidates that are not `kept`, bool `[n, K]`."""
        self.logits = torch.where(kept, self.logits, EXCLUDED)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the probabilities as integers `[n, K]`, and their sums `[n, 1]`."""
        top = self.logits.amax(1, keepdim=True)
        exact = (self.logits.double() - top.double()).exp_().mul_(_SCALE)
        whole = torch.where(self.logits > EXCLUDED, exact, 0).long()
        return whole, whole.sum(1, keepdim=True)

    def rank(self) -> torch.Tensor:
        """Return the place of each candidate, `[1, K]`, from 0. They are sorted."""
        return torch.arange(self.logits.shape[1], device=self.logits.device)[None]


def entropy(weights: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the entropies of distributions in nats, float64 `[n, 1]`."""
    p = weights.double() / total
    return (-torch.xlogy(p, p) * _SCALE).long().sum(1, keepdim=True).double() / _SCALE


def top_p(candidates: Candidates, columns: Columns) -> None:
    """Keep the fewest most likely tokens whose probabilities sum to top_p (Holtzman et al., arXiv:1904.09751)."""
    candidates.sort()
    weights, total = candidates.weights()
    before = weights.cumsum(1) - weights
    candidates.keep((before < total * columns.top_p) | (candidates.rank() < columns.min_keep))


def min_p(candidates: Candidates, columns: Columns) -> None:
    """Keep tokens of at least min_p times the largest probability (Nguyen et al., arXiv:2407.01082)."""
    candidates.sort()
    logits = candidates.logits.double()
    least = logits[:, :1] + columns.min_p.log()
    candidates.keep((logits >= least) | (candidates.rank() < columns.min_keep))


def typical_p(candidates: Candidates, columns: Columns) -> None:
    """Keep the tokens whose information is nearest to the entropy, until their probabilities exceed typical_p
    (Meister et al., arXiv:2202.00666).
    """
    candidates.sort()
    weights, total = candidates.weights()
    distance = (-(weights.double() / total).log() - entropy(weights, total)).abs_()
    order = distance.sort(dim=1, stable=True).indices
    chosen = weights.gather(1, order)
    before = chosen.cumsum(1) - chosen
    kept = (before <= total * columns.typical_p) | (candidates.rank() < columns.min_keep)
    candidates.keep(torch.zeros_like(kept).scatter_(1, order, kept))


def top_n_sigma(candidates: Candidates, columns: Columns) -> None:
    """Keep logits within n standard deviations of the largest one (Tang et al., arXiv:2411.07641); 0 keeps all."""
    logits, real = candidates.logits, candidates.logits > EXCLUDED
    count = real.sum(1, keepdim=True).clamp_(min=1)
    known = torch.where(real, logits, 0).double()
    mean = (known * _LOGIT_SCALE).long().sum(1, keepdim=True).double() / _LOGIT_SCALE / count
    squares = torch.where(real, (known - mean).square_(), 0)
    deviation = ((squares * _LOGIT_SCALE).long().sum(1, keepdim=True).double() / _LOGIT_SCALE / count).sqrt()
    least = logits.amax(1, keepdim=True).double() - columns.top_n_sigma * deviation
    candidates.keep((logits.double() >= least) | (columns.top_n_sigma <= 0))


def xtc(candidates: Candidates, columns: Columns) -> None:
    """Exclude top choices: with xtc_probability, drop all but the least likely of the tokens that have at least
    xtc_threshold.
    """
    candidates.sort()
    weights, total = candidates.weights()
    num_left = (candidates.logits > EXCLUDED).sum(1, keepdim=True)
    dropped = (weights >= total * columns.xtc_threshold).sum(1, keepdim=True) - 1
    acts = (columns.uniform < columns.xtc_probability) & (num_left - dropped >= columns.min_keep)
    candidates.keep((candidates.rank() >= dropped) | ~acts)


def temperature(candidates: Candidates, columns: Columns) -> None:
    """Divide by the temperature; 0 keeps the largest logit. With dynatemp_range it follows the entropy, relative to
    that of as many equally likely tokens.
    """
    logits, value = candidates.logits, columns.temperature
    weights, total = candidates.weights()
    num_left = (logits > EXCLUDED).sum(1, keepdim=True)
    lowest, highest = (value - columns.dynatemp_range).clamp(min=0), value + columns.dynatemp_range
    share = entropy(weights, total) / num_left.clamp(min=2).double().log()
    dynamic = lowest + (highest - lowest) * share.pow(columns.dynatemp_exponent)
    value = torch.where((columns.dynatemp_range > 0) & (num_left > 1), dynamic, value)
    scaled = (logits.double() / value.clamp(min=1e-30)).float()
    first = torch.arange(logits.shape[1], device=logits.device)[None] == logits.argmax(1, keepdim=True)
    candidates.logits = torch.where(value > 0, scaled, torch.where(first, logits, EXCLUDED))


def mirostat_1(candidates: Candidates, columns: Columns) -> None:
    """Keep the k most likely tokens, k from the surprise `mu` and the slope of the distribution (Basu et al.,
    arXiv:2007.14966).
    """
    candidates.sort()
    num = min(_MIROSTAT_TOKENS, candidates.logits.shape[1])
    logits = candidates.logits[:, :num].double()
    steps = torch.arange(1, num, device=logits.device, dtype=torch.float64)
    t = ((steps + 1) / steps).log()[None]
    b = logits[:, :-1] - logits[:, 1:]
    real = logits[:, 1:] > EXCLUDED
    products, squares = torch.where(real, t * b, 0), torch.where(real, t * t, 0)
    total = lambda x: (x * _SCALE / 64).long().sum(1, keepdim=True).double()  # noqa: E731
    slope = total(products) / total(squares).clamp(min=1)
    epsilon = slope - 1
    vocab_size = float(candidates._vocab_size)
    k = (epsilon * columns.mu.exp2() / (1 - (-epsilon * math.log(vocab_size)).exp())).pow(1 / slope)
    k = torch.nan_to_num(k, nan=1.0, posinf=vocab_size, neginf=1.0).clamp(1, vocab_size).floor()
    candidates.keep(candidates.rank() < k)


def mirostat_2(candidates: Candidates, columns: Columns) -> None:
    """Keep tokens whose surprise, in bits, is at most `mu`, and the most likely one."""
    candidates.sort()
    weights, total = candidates.weights()
    surprise = -(weights.double() / total).log2()
    candidates.keep((surprise <= columns.mu) | (candidates.rank() == 0))


STAGES: dict[str, Callable[[Candidates, Columns], None]] = {
    "top_n_sigma": top_n_sigma,
    "typ_p": typical_p,
    "top_p": top_p,
    "min_p": min_p,
    "xtc": xtc,
    "temperature": temperature,
    "mirostat_1": mirostat_1,
    "mirostat_2": mirostat_2,
}
