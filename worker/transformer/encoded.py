"""The output of an encoder, as layers with cross-attention take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Encoded:
    """The encoder's output for the requests that begin in a step, one after another, and the slots of their keys and
    values in the caches of the group "cross".
    """

    hidden: torch.Tensor  # [M, H]
    slots: torch.Tensor  # [M] int64
