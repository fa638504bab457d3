"""What a mixture-of-experts layer is made of. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How a token's experts and their weights follow from its router logits.

    A score per expert; the experts with the largest scores (plus correction biases, if there are any), possibly of the
    best groups of experts only; and their weights, which come from the scores without biases.
    """

    num_experts: int
    top_k: int
    scores: str = "softmax"  # softmax or sigmoid of the logits; logits
    weights: str = "scores"  # the chosen scores; normalized: divided by their sum; softmax or sigmoid of them
    scale: float = 1.0  # of the weights
    epsilon: float = 0.0  # added to the sum that normalizes
    num_groups: int = 1  # equal groups of consecutive experts
    top_groups: int = 1  # number of groups to choose from
    group_best: int = 1  # a group's score is the sum of this many of its largest scores
    bias: bool = False  # of the logits
    correction: bool = False  # correction biases, added to the scores to choose, not to weigh
    float32: bool = False  # logits are computed in float32, from weights kept in float32


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The MLP of a mixture-of-experts layer."""

    routing: RoutingSpec
    intermediate_size: int  # of each expert
    activation: str = "silu"  # a key of `moe.GATED`
    bias: bool = False  # of the experts
    weigh_inputs: bool = False  # the weights multiply the experts' inputs, not their outputs
    router: str = "gate"  # name of the router in the checkpoint
    correction: str = "gate.e_score_correction_bias"
    transposed: bool = False  # fused weights are [E, in, out]; decides only where the shape does not
    interleaved: bool = False  # fused gate and up rows alternate
    shared: str | None = None  # name of the shared expert, an MLP that all tokens pass
    shared_size: int = 0  # its intermediate size
    shared_gate: str | None = None  # name of the gate whose sigmoid multiplies its output
