"""Sizes of the mixers that keep a recurrent state, as read from config.json. Torch-free.

Sizes are those of the whole model; `shapes(tp)` are the states on each of `tp` ranks, the last inputs of the
convolution first.
"""

from __future__ import annotations

from dataclasses import dataclass

Shapes = tuple[tuple[int, ...], ...]


def check_split(name: str, size: int, tp: int) -> None:
    """Raise ValueError, naming the size, unless `tp` divides it."""
    if size % tp:
        raise ValueError(f"{name} {size} is not divisible by tensor_parallel_size {tp}")


@dataclass(frozen=True, slots=True)
class WholeSpec:
    """States of `sizes` that are not split over ranks: those of models that transformers computes."""

    sizes: Shapes

    def shapes(self, tp: int) -> Shapes:
        return self.sizes

    def check(self, tp: int) -> None:
        """Raise ValueError unless there is one rank."""
        if tp > 1:
            raise ValueError(f"tensor_parallel_size {tp} does not work with models that transformers computes")


@dataclass(frozen=True, slots=True)
class CompressorSpec:
    """The sums of compressed keys (`layers/states/compression.py`), the same on every rank."""

    series: int
    channels: int

    def shapes(self, tp: int) -> Shapes:
        return ((self.series, 3, self.channels),)

    def check(self, tp: int) -> None:
        """Accept any number of ranks."""


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """Gated short convolution (LFM2)."""

    width: int
    channels: int
    bias: bool = False

    def shapes(self, tp: int) -> Shapes:
        return ((self.width - 1, self.channels // tp),)

    def check(self, tp: int) -> None:
        """Raise ValueError, naming the size, unless it can be split over `tp` ranks."""
        check_split("hidden_size", self.channels, tp)


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Gated delta rule: Gated DeltaNet, or Kimi Delta Attention."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    width: int
    grouped: bool = False  # the checkpoint holds q, k, v and z of each key head together (Qwen3-Next)
    grouped_gates: bool = False  # the same for b and a
    neg_eigval: bool = False  # beta is doubled
    tiled: bool = False  # value head i is of key head i % num_k_heads (GGUF), not of i // (num_v_heads / num_k_heads)
    # for mixers "separate_delta" and "kimi_delta" only
    decay_dim: int = 1  # decays per value head: one, or one per channel of keys (Kimi Delta Attention)
    lower_bound: float | None = None  # of the logarithm of the decay, which is then a sigmoid
    low_rank: int = 0  # for the projections to the decays and to the gate, 0: they are one matrix each
    norm_eps: float | None = None  # for the result's norm, None: the model's
    # for all of them
    gate: str = "silu"  # activation of the gate, or "sigmoid"
    others: Shapes = ()  # states of other parts of the layer, which follow; whole on every rank

    def shapes(self, tp: int) -> Shapes:
        channels = 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim
        return (self.width - 1, channels // tp), (self.num_v_heads // tp, self.k_dim, self.v_dim), *self.others

    def check(self, tp: int) -> None:
        """Raise ValueError, naming the size, unless it can be split over `tp` ranks."""
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"linear_num_value_heads {self.num_v_heads} is not a multiple of linear_num_key_heads "
                f"{self.num_k_heads}"
            )
        check_split("linear_num_key_heads", self.num_k_heads, tp)
        if self.tiled and tp > 1 and self.num_v_heads > self.num_k_heads:
            raise ValueError(
                f"tensor_parallel_size {tp}: the value heads of GGUF files of this architecture are not in the order "
                "in which they can be split; give the original model in safetensors"
            )


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """The mixer of Mamba 2."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    width: int
    conv_bias: bool = True
    bias: bool = False  # for the projections
    # bounds of the time step
    dt_min: float = 0.0
    dt_max: float = float("inf")
    norm: str = "gate_first"  # grouped norm of y * silu(z); "norm_first": of y, then * silu(z); "none"
    norm_groups: int = 1  # groups of the norm
    eps: float = 1e-5
    scales: tuple[float, ...] | None = None  # factors of the projected z, x, B, C and dt
    out_bias: bool | None = None  # for the last projection, None: as of the first

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    def groups(self, tp: int) -> int:
        """Return the number of groups on each rank: with fewer groups than ranks several ranks hold the same one."""
        return max(1, self.num_groups // tp)

    def shapes(self, tp: int) -> Shapes:
        channels = self.inner // tp + 2 * self.groups(tp) * self.state_size
        return (self.width - 1, channels), (self.num_heads // tp, self.state_size, self.head_dim)

    def check(self, tp: int) -> None:
        """Raise ValueError, naming the size, unless it can be split over `tp` ranks."""
        if self.num_heads % self.num_groups:
            raise ValueError(f"{self.num_heads} Mamba heads are not a multiple of the {self.num_groups} groups")
        check_split("the number of Mamba heads", self.num_heads, tp)
        if self.num_groups % tp and tp % self.num_groups:
            raise ValueError(f"{self.num_groups} Mamba groups cannot be split over tensor_parallel_size {tp}")
        if self.norm != "none" and self.norm_groups % tp and tp > 1 and self.norm_groups > 1:
            raise ValueError(f"{self.norm_groups} groups of the norm cannot be split over tensor_parallel_size {tp}")


@dataclass(frozen=True, slots=True)
class Mamba1Spec:
    """The mixer of Mamba 1."""

    inner: int
    state_size: int
    dt_rank: int
    width: int
    conv_bias: bool = True
    bias: bool = False  # for in_proj and out_proj
    norms: str = "none"  # for dt, B and C: "none"; "weight", RMS norms with weights; "plain", without
    eps: float = 1e-6

    def shapes(self, tp: int) -> Shapes:
        return (self.width - 1, self.inner // tp), (self.inner // tp, self.state_size)

    def check(self, tp: int) -> None:
        """Raise ValueError, naming the size, unless it can be split over `tp` ranks."""
        check_split("the inner size of Mamba", self.inner, tp)


@dataclass(frozen=True, slots=True)
class PlamoMambaSpec:
    """The mixer of PLaMo 2: the state of Mamba 2 with one group, B, C and dt from x as in Mamba 1."""

    num_heads: int
    head_dim: int
    state_size: int
    dt_rank: int
    width: int
    eps: float

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    def shapes(self, tp: int) -> Shapes:
        return (self.width - 1, self.inner // tp), (self.num_heads // tp, self.state_size, self.head_dim)

    def check(self, tp: int) -> None:
        """Raise ValueError, naming the size, unless it can be split over `tp` ranks."""
        check_split("mamba_num_heads", self.num_heads, tp)


@dataclass(frozen=True, slots=True)
class LightningSpec:
    """Lightning attention: linear attention with a constant decay per head."""

    num_heads: int
    head_dim: int
    decay_scale: float  # for the layer; multiplies the heads' decays
    # for mixer "rotary_lightning" only
    norm_groups: int = 1  # groups of the result's norm
    silu: bool = True  # for q, k and v
    qk_norm: bool = False  # for each head of q and k
    bias: bool = False  # for the projection to q, k and v
    out_bias: bool = False

    def shapes(self, tp: int) -> Shapes:
        return ((self.num_heads // tp, self.head_dim, self.head_dim),)

    def check(self, tp: int) -> None:
        """Raise ValueError, naming the size, unless it can be split over `tp` ranks."""
        check_split("num_attention_heads", self.num_heads, tp)


@dataclass(frozen=True, slots=True)
class HeadConvSpec:
    """Convolutions of the heads of q and k, and delayed values, in front of attention (ZAYA)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    widths: tuple[int, int]

    def shapes(self, tp: int) -> Shapes:
        convolved, delayed = (self.num_heads + self.num_kv_heads) // tp, self.num_kv_heads * self.head_dim // 2
        return ((sum(self.widths) - 2, convolved * self.head_dim + delayed),)

    def check(self, tp: int) -> None:
        """Raise ValueError, naming the size, unless it can be split over `tp` ranks."""
        check_split("num_key_value_heads", self.num_kv_heads, tp)


@dataclass(frozen=True, slots=True)
class ResultConvSpec:
    """Convolutions of keys and values, and of the results of attention and of the MLP (Inkling)."""

    width: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int

    def shapes(self, tp: int) -> Shapes:
        keys_and_values = 2 * self.num_kv_heads * self.head_dim // tp
        return tuple((self.width - 1, size) for size in (keys_and_values, self.hidden_size, self.hidden_size))

    def check(self, tp: int) -> None:
        """Raise ValueError, naming the size, unless it can be split over `tp` ranks."""
        check_split("num_key_value_heads", self.num_kv_heads, tp)


_Convolutions = ResultConvSpec | HeadConvSpec | ShortConvSpec
StateSpec = _Convolutions | DeltaSpec | Mamba2Spec | Mamba1Spec | PlamoMambaSpec | LightningSpec
