"""The samplers of llama.cpp by their definitions: plain loops over a list of candidates, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quire.worker.messages import Dry, SamplingParams

Candidate = tuple[int, float]  # token, logit


def softmax(candidates: list[Candidate]) -> list[float]:
    top = max(logit for _, logit in candidates)
    weights = [math.exp(logit - top) for _, logit in candidates]
    return [weight / sum(weights) for weight in weights]


def entropy(probabilities: Sequence[float]) -> float:
    return -sum(p * math.log(p) for p in probabilities if p > 0)


class Chain:
    """`distribution(logits)` of a request; `observe` tells mirostat which token was drawn."""

    def __init__(self, sampling: SamplingParams, context: list[int] = (), uniform: float = 0.0):
        self.sampling, self.chain, self.context, self.uniform = sampling, sampling.chain, list(context), uniform
        self.mu = 2 * self.chain.mirostat_tau
        self.keep = self.chain.min_keep

    def distribution(self, logits: Sequence[float]) -> np.ndarray:
        chain = self.chain
        order = ["temperature", f"mirostat_{chain.mirostat}"] if chain.mirostat else chain.order
        candidates = [(token, float(logit)) for token, logit in enumerate(logits) if logit > -math.inf]
        for name in order:
            candidates = getattr(self, name)(candidates)
        result = np.zeros(len(logits))
        for (token, _), p in zip(candidates, softmax(candidates), strict=True):
            result[token] = p
        return result

    def observe(self, distribution: np.ndarray, token: int) -> None:
        self.mu -= self.chain.mirostat_eta * (-math.log2(distribution[token]) - self.chain.mirostat_tau)

    @staticmethod
    def ordered(candidates: list[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=lambda candidate: -candidate[1])

    def penalties(self, candidates: list[Candidate]) -> list[Candidate]:
        given = self.sampling
        recent = self.context if given.repeat_last_n == -1 else self.context[-given.repeat_last_n :]
        result = []
        for token, logit in candidates:
            if count := recent.count(token):
                logit = logit / given.repetition_penalty if logit > 0 else logit * given.repetition_penalty
                logit -= count * given.frequency_penalty + given.presence_penalty
            result.append((token, logit))
        return result

    def dry(self, candidates: list[Candidate]) -> list[Candidate]:
        amounts = dry_penalties(self.context, self.chain.dry) if self.chain.dry else {}
        return [(token, logit - amounts.get(token, 0.0)) for token, logit in candidates]

    def top_n_sigma(self, candidates: list[Candidate]) -> list[Candidate]:
        if self.chain.top_n_sigma <= 0 or len(candidates) < 2:
            return candidates
        logits = np.array([logit for _, logit in candidates])
        least = logits.max() - self.chain.top_n_sigma * logits.std()
        return [candidate for candidate in candidates if candidate[1] >= least]

    def top_k(self, candidates: list[Candidate]) -> list[Candidate]:
        return self.ordered(candidates)[: self.sampling.top_k or None]

    def top_p(self, candidates: list[Candidate]) -> list[Candidate]:
        if self.sampling.top_p >= 1:
            return candidates
        candidates, total = self.ordered(candidates), 0.0
        for i, p in enumerate(softmax(candidates)):
            total += p
            if total >= self.sampling.top_p and i + 1 >= self.keep:
                return candidates[: i + 1]
        return candidates

    def min_p(self, candidates: list[Candidate]) -> list[Candidate]:
        if self.sampling.min_p <= 0:
            return candidates
        candidates = self.ordered(candidates)
        least = candidates[0][1] + math.log(self.sampling.min_p)
        return [c for i, c in enumerate(candidates) if c[1] >= least or i < self.keep]

    def typ_p(self, candidates: list[Candidate]) -> list[Candidate]:
        if self.chain.typical_p >= 1:
            return candidates
        candidates = self.ordered(candidates)
        probabilities = softmax(candidates)
        mean = entropy(probabilities)
        order = sorted(
            range(len(candidates)),
            key=lambda i: abs(-math.log(probabilities[i]) - mean) if probabilities[i] else math.inf,
        )
        total, kept = 0.0, []
        for number, i in enumerate(order):
            kept.append(candidates[i])
            total += probabilities[i]
            if total > self.chain.typical_p and (self.keep == 0 or number >= self.keep - 1):
                break
        return kept

    def xtc(self, candidates: list[Candidate]) -> list[Candidate]:
        chain = self.chain
        if chain.xtc_probability <= 0 or chain.xtc_threshold > 0.5 or len(candidates) < 2:
            return candidates
        if self.uniform >= chain.xtc_probability:
            return candidates
        candidates = self.ordered(candidates)
        last = sum(p >= chain.xtc_threshold for p in softmax(candidates)) - 1
        return candidates[last:] if last > 0 and len(candidates) - last >= self.keep else candidates

    def temperature(self, candidates: list[Candidate]) -> list[Candidate]:
        value, chain = self.sampling.temperature, self.chain
        if chain.dynatemp_range > 0:
            if len(candidates) < 2:
                return candidates
            low, high = max(0.0, value - chain.dynatemp_range), value + chain.dynatemp_range
            share = entropy(softmax(candidates)) / math.log(len(candidates))
            value = low + (high - low) * share**chain.dynatemp_exponent
        if value <= 0:
            return [max(candidates, key=lambda candidate: candidate[1])]
        return [(token, logit / value) for token, logit in candidates]

    def mirostat_1(self, candidates: list[Candidate]) -> list[Candidate]:
        candidates, size = self.ordered(candidates), len(candidates)
        if size == 1:
            return candidates
        products = squares = 0.0
        for i in range(min(99, size - 1)):
            t = math.log((i + 2) / (i + 1))
            products += t * (candidates[i][1] - candidates[i + 1][1])
            squares += t * t
        slope = products / squares
        epsilon = slope - 1
        with np.errstate(all="ignore"):
            k = np.power(np.float64(epsilon) * 2**self.mu / (1 - np.float64(size) ** -epsilon), 1 / slope)
        return candidates[: max(int(min(np.nan_to_num(k, nan=1.0), size)), 1)]

    def mirostat_2(self, candidates: list[Candidate]) -> list[Candidate]:
        candidates = self.ordered(candidates)
        surprises = [-math.log2(p) if p else math.inf for p in softmax(candidates)]
        return candidates[: max(sum(surprise <= self.mu for surprise in surprises), 1)]


def dry_penalties(context: list[int], dry: Dry) -> dict[int, float]:
    """The amounts that DRY subtracts, by token."""
    if dry.last_n == 0:
        return {}
    recent = (context[-dry.last_n :] if dry.last_n >= 0 else context)[::-1]  # the last token first
    if len(recent) <= dry.allowed_length:
        return {}
    limit = len(recent)
    for i, token in enumerate(recent):
        matches = [0] if token in dry.breakers else []
        for first, rest in dry.sequences:
            if token in first and len(rest) <= i and all(recent[i - n] == t for n, t in enumerate(rest, 1)):
                matches.append(len(rest))
        if matches:
            limit = i - max(matches)
            break
    if limit < dry.allowed_length:
        return {}
    longest: dict[int, int] = {}
    for k in range(1, len(recent)):
        n = 0
        while n + k < len(recent) and recent[n] == recent[n + k]:
            n += 1
        n = min(n, limit)
        if n >= dry.allowed_length:
            longest[recent[k - 1]] = max(longest.get(recent[k - 1], 0), n)
    most = int(88.7228391 / math.log(dry.base)) if dry.base > 1.000001 else math.inf
    return {
        token: dry.multiplier * dry.base ** min(n - dry.allowed_length, most)
        for token, n in longest.items()
        if token not in dry.breakers
    }
