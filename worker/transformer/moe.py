"""The MLP of a mixture-of-experts layer: a router, its experts, and an expert that all tokens share."""

from __future__ import annotations

import re
from typing import ClassVar

import torch
from torch import nn

from quire.worker.layers.activation import ACTIVATIONS
from quire.worker.layers.linear import (
    PLAIN,
    PLAIN_WEIGHTS,
    GateUpParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    Part,
    RowParallelLinear,
    RowProduct,
    WeightFormat,
    empty_parameter,
    whole,
)
from quire.worker.layers.moe import give_other_parts, make_experts
from quire.worker.layers.routing import route, weigh
from quire.worker.layers.rowwise import sigmoid
from quire.worker.parallel import Exchange, tp
from quire.worker.platforms.ops import Ops
from quire.worker.spec.model import ModelSpec
from quire.worker.spec.moe import MoESpec, RoutingSpec
from quire.worker.transformer.names import TensorNames


class RouterLinear(Linear):
    """The logits of all experts, `[T, H] -> [T, E]`, the same on every rank."""

    takes_adapters: ClassVar = False

    def __init__(self, hidden_size: int, num_experts: int, prefix: str):
        self.prefix = prefix
        super().__init__(hidden_size, num_experts, False, PLAIN)

    def weight_parts(self) -> list[Part]:
        return [Part(f"{self.prefix}.weight", (self.out_features, self.in_features))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits in float32, or in torch's product dtype: then routing converts them, without another
        kernel.
        """
        return (self.method.apply if self.method is PLAIN else self.method.apply_float32)(self, x)


class WideRouterLinear(RowProduct):
    """`RouterLinear` in float32, whatever the model's dtype."""

    def __init__(self, hidden_size: int, num_experts: int, prefix: str):
        super().__init__(hidden_size, num_experts, prefix, torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x.float(), self.weight)


class SharedGate(RowProduct):
    """The factor of a shared expert's output, `[T, H] -> [T, 1]`."""

    def __init__(self, hidden_size: int, prefix: str):
        super().__init__(hidden_size, 1, prefix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sigmoid(self.multiply(x, self.weight).float()).to(x.dtype)


class Router(nn.Module):
    """Chooses the experts of each row of x `[T, H]`: (weights float32 `[T, k]`, ids int64 `[T, k]`)."""

    native_twin: ClassVar = "router"
    place: ClassVar[str] = "gate"  # for its tensors, next to the experts

    def __init__(self, hidden_size: int, spec: RoutingSpec, prefix: str):
        super().__init__()
        self.spec, size = spec, spec.num_experts
        self.linear = (WideRouterLinear if spec.float32 else RouterLinear)(hidden_size, size, prefix)
        self.bias = self.correction = None
        if spec.bias:
            self.bias = empty_parameter(size, parts=[Part(f"{prefix}.bias", (size,))], dtype=torch.float32)
        if spec.correction:
            name = f"{prefix}.e_score_correction_bias"
            self.correction = empty_parameter(size, parts=[Part(name, (size,))], dtype=torch.float32)
            give_other_parts(self.correction, [[Part(name, (1, size), view=torch.Tensor.flatten)]])
            self.correction.if_absent = 0.0 if spec.optional_correction else None
        self.route = route

    def use(self, ops: Ops) -> None:
        """Switch to a platform's operations."""
        self.route = ops.route

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.route(self.spec, self.linear(x), self.correction, self.bias)


class HashRouter(Router):
    """The experts of a token are in a table; their weights come from the scores."""

    def __init__(self, hidden_size: int, spec: RoutingSpec, prefix: str):
        super().__init__(hidden_size, spec, prefix)
        shape = spec.num_hashed, spec.top_k
        part = Part(f"{prefix}.tid2eid", shape, types=("I64", "I32"))
        self.table = empty_parameter(*shape, parts=[part], dtype=torch.int64)

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.table[token_ids.long()]
        return weigh(self.spec, self.linear(x), ids), ids


class SharedExpert(nn.Module):
    """An MLP; this rank's part of its sum over the ranks."""

    def __init__(self, spec: ModelSpec, moe: MoESpec, prefix: str, weights: WeightFormat):
        super().__init__()
        hidden_size, bias, fused = spec.hidden_size, spec.mlp_bias, "gate_up_proj" in spec.fused
        size, method = moe.shared_size, weights.linear(f"{prefix}.gate_up_proj")
        act = moe.shared_activation or moe.activation
        self.gate_up_proj = GateUpParallelLinear(hidden_size, size, bias, prefix, method, act, fused)
        self.down_proj = RowParallelLinear(
            size, hidden_size, bias, f"{prefix}.down_proj", "shared_size", weights.linear(f"{prefix}.down_proj")
        )

    def round_for_products(self) -> None:
        """See `DecoderLayer.round_for_products`."""
        self.gate_up_proj.round_for(self.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj.product(self.gate_up_proj(x))


class UngatedSharedExpert(nn.Module):
    """A `SharedExpert` without a gate: down(activation(up(x)))."""

    def __init__(self, spec: ModelSpec, moe: MoESpec, prefix: str, weights: WeightFormat):
        super().__init__()
        hidden_size, size, bias, method = spec.hidden_size, moe.shared_size, spec.mlp_bias, weights.linear
        self.up_proj = MergedColumnParallelLinear(
            hidden_size, size, ("up_proj",), bias, prefix, "shared_size", method(f"{prefix}.up_proj")
        )
        self.down_proj = RowParallelLinear(
            size, hidden_size, bias, f"{prefix}.down_proj", "shared_size", method(f"{prefix}.down_proj")
        )
        self.activation = ACTIVATIONS[moe.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj.product(self.activation(self.up_proj(x)))


class MoE(nn.Module):
    """Maps x `[T, H]` to `[T, H]`."""

    native_twin: ClassVar = "moe"
    router: ClassVar[type[Router]] = Router

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        moe, hidden = spec.layers[layer].moe, spec.hidden_size
        self.group, self.hidden_size, self.prefix, self.num_experts = tp(), hidden, prefix, moe.routing.num_experts
        self.gate = self.router(hidden, moe.routing, f"{prefix}.{self.router.place}")
        self.experts = make_experts(moe.latent_size or hidden, moe, f"{prefix}.experts", weights)
        # to and from the width of the experts, both linear: the second one multiplies a part of the sum over the ranks
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if moe.latent_size:
            self.fc1_latent_proj = whole(hidden, moe.latent_size, f"{prefix}.fc1_latent_proj", weights)
            self.fc2_latent_proj = whole(moe.latent_size, hidden, f"{prefix}.fc2_latent_proj", weights)
        self.shared_expert = self.shared_expert_gate = None
        if moe.shared_size:
            make = SharedExpert if moe.gated else UngatedSharedExpert
            self.shared_expert = make(spec, moe, f"{prefix}.shared_expert", weights)
        if moe.shared_gate:
            self.shared_expert_gate = SharedGate(hidden, f"{prefix}.shared_expert_gate")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x, self.gate(x))

    def run(self, x: torch.Tensor, chosen: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Pass x through experts with weights, see `Router`."""
        if self.fc1_latent_proj is None:
            out = self.experts(x, *chosen)
        else:
            out = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x), *chosen))
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                shared = shared * self.shared_expert_gate(x)
            out = out + shared
        return self.group.all_reduce(out)

    def has_elsewhere(self, name: str, names: TensorNames) -> bool:
        """Return whether the tensor `name` of the files belongs to an expert of another rank."""
        start, end = names.in_file(f"{self.prefix}.experts.#.").split("#")
        match = re.match(rf"{re.escape(start)}(\d+){re.escape(end)}", name)
        return match is not None and int(match[1]) not in self.experts.local and int(match[1]) < self.num_experts

    def exchanges(self, num_tokens: int) -> list[Exchange]:
        """Return the all-reduces of `forward`, in order."""
        return [((num_tokens, self.hidden_size), None)]


class HashMoE(MoE):
    """Experts that are chosen by the token alone."""

    router: ClassVar[type[Router]] = HashRouter

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self.run(x, self.gate(x, token_ids))
