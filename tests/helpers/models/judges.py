"""Loads families' checkpoints in transformers, and compares its choices with ours."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from tests.helpers.models.families import causal_lm_class


def load_family(folder: str, bounded: bool = True) -> Any:
    """Return the checkpoint in transformers, its time steps `bounded` as the published code does."""
    from transformers import AutoConfig

    cls = causal_lm_class(AutoConfig.from_pretrained(folder).model_type)
    model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if bounded:
        _bound_time_steps(model)
    return model


def _bound_time_steps(model: Any) -> None:
    """Bound time steps by `time_step_limit`, as the published code of these models does; transformers takes
    `time_step_min` for the lower bound (huggingface/transformers#48989).
    """
    for module in model.modules():
        if type(module).__name__ in ("NemotronHMamba2Mixer", "Zamba2MambaMixer"):
            low, high = getattr(module.config, "time_step_limit", None) or (0.0, float("inf"))
            module.time_step_limit = float(low), float(high)


def judge(
    model: Any, prompt: list[int], tokens: list[int], logprobs: list[float], margin: float = 1e-3
) -> tuple[int, float]:
    """Compare greedy `tokens` after `prompt` and their log-probabilities with a forward pass of transformers `model`
    over both: (number of tokens that are not its choice although that leads by `margin`, largest error of a
    log-probability).
    """
    lead, wanted = opinion(model, tuple(prompt), tuple(tokens))
    return int((lead > margin).sum()), float((wanted - wanted.new_tensor(logprobs)).abs().max())


@lru_cache(maxsize=64)  # a test asks for one continuation several times
def opinion(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the lead of the choice of transformers `model` over each of `tokens` after `prompt`, and the tokens'
    log-probabilities.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
    chosen = torch.tensor(tokens)[:, None]
    lead = logits.max(-1).values - logits.gather(-1, chosen)[:, 0]
    return lead, logits.log_softmax(-1).gather(-1, chosen)[:, 0]
