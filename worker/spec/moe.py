"""The formulas of a mixture-of-experts layer. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """The choice of a token's experts and their weights by its router logits.

    Each expert has a score. The experts with the largest scores (plus correction biases, if there are any) are chosen,
    possibly only from the best groups. Their weights come from the scores without biases.
    """

    num_experts: int
    top_k: int
    scores: str = "softmax"  # softmax or sigmoid of the logits; sqrtsoftplus: the root of their softplus; logits
    weights: str = "scores"  # the chosen scores; normalized: divided by their sum; softmax or sigmoid of them
    scale: float = 1.0  # for the weights
    epsilon: float = 0.0  # added to the sum that normalizes
    num_groups: int = 1  # equal groups of consecutive experts
    top_groups: int = 1  # number of groups to choose from
    group_best: int = 1  # a group's score is the sum of this many of its largest scores
    bias: bool = False  # for the logits
    correction: bool = False  # correction biases, added to the scores to choose, not to weigh
    optional_correction: bool = False  # files may lack the correction biases, which are 0 then
    num_hashed: int = 0  # number of token ids whose experts are in a table; 0: the scores decide
    float32: bool = False  # logits are computed in float32, from weights kept in float32

    @property
    def has_kernels(self) -> bool:
        """Return whether the platforms' kernels know the formula of the scores."""
        return self.scores != "sqrtsoftplus"

    @property
    def bounds_groups(self) -> bool:
        """Return whether the experts are chosen from some of the groups only."""
        return self.num_groups > 1 and self.top_groups < self.num_groups


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The MLP of a mixture-of-experts layer. Sizes are those of the whole model, not of a rank."""

    routing: RoutingSpec
    intermediate_size: int  # for each expert
    activation: str = "silu"  # a name of `activation.gated`, of experts without gate a key of `activation.ACTIVATIONS`
    gated: bool = True  # whether an expert has a gate projection
    latent_size: int = 0  # width of the experts' inputs and outputs, which are projections; 0: the hidden size
    bias: bool = False  # for the experts
    weigh_inputs: bool = False  # the weights multiply the experts' inputs, not their outputs
    # how the checkpoint holds experts if all are in one tensor
    transposed: bool = False  # [E, in, out]; decides only where the shape does not
    interleaved: bool = False  # gate and up rows alternate
    shared_size: int = 0  # intermediate size of the shared expert, an MLP that all tokens pass; 0: none
    shared_activation: str | None = None  # None: that of the others
    shared_gate: bool = False  # the sigmoid of a gate multiplies the shared expert's output
