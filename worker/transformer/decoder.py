"""The decoder shared by all language models. A family is a subclass of `CausalLM` that reads its config.json
(`reader.py`) into a spec, from which the decoder is built.

Shapes: T tokens of all requests of the step, concatenated; H = hidden size; D = head size. Module names are those of
Llama's checkpoints, so a parameter's path is its tensor's name, but for a family's `renames`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.checkpoints.ranks import too_many_stages
from quire.worker.attention.base import GroupedMetadata
from quire.worker.attention.cross_weights import CrossWeights
from quire.worker.host.huge_pages import Workspace
from quire.worker.layers.embedding import ParallelLMHead, PositionEmbedding, VocabParallelEmbedding
from quire.worker.layers.linear import PLAIN_WEIGHTS, Linear, WeightFormat
from quire.worker.layers.lora import StepLora
from quire.worker.layers.norm import NORMS
from quire.worker.layers.rotary import RotaryEmbedding, Rotation, still_query_scale
from quire.worker.parallel import Exchange, pp
from quire.worker.platforms.ops import FusedLayers, Ops
from quire.worker.spec.index import unread_indexes
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.transformer.blocks import BLOCKS, DecoderLayer
from quire.worker.transformer.calls import Encoded, LayerCall, StageCall
from quire.worker.transformer.moe import MoE
from quire.worker.transformer.mtp import PredictionHead
from quire.worker.transformer.names import TensorNames, below
from quire.worker.transformer.reader import ConfigReader

if TYPE_CHECKING:
    from quire.worker.transformer.pooling import Pooler
    from quire.worker.transformer.vision.image_embeds import ImageEmbeds
    from quire.worker.transformer.vision.tower import VisionTower


# keys of config.json whose values are numbers of layers that draft tokens
_DRAFTING = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")


class Decoder(nn.Module):
    """The layers of this pipeline stage. The first stage also has the embedding, the last stage the final norm, and the
    embedding if it has a head that drafts tokens.
    """

    # modules outside the layers that only the first or only the last stage has
    of_first_stage: ClassVar[tuple[str, ...]] = ("model.embed_tokens", "model.embed_positions")
    of_last_stage: ClassVar[tuple[str, ...]] = ("model.norm",)

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        stage = pp()
        self.spec = spec
        self.first, self.last = stage.rank == 0, stage.rank == stage.size - 1
        if self.first or (self.last and (spec.has_head or spec.captures)):
            self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, "model.embed_tokens", weights)
            if spec.learned_positions is not None:
                size = spec.max_position_embeddings + spec.learned_positions
                self.embed_positions = PositionEmbedding(size, spec.hidden_size, spec.learned_positions)
        self.layers = nn.ModuleDict(
            {
                str(i): self.layer_cls(spec)(spec, i, f"model.layers.{i}", weights)
                for i in stage_layers(spec.layers, stage.rank, stage.size)
            }
        )
        if self.last and self.layer_cls(spec).needs_norm:
            self.norm = NORMS[spec.norm](spec.hidden_size, spec.norm_eps)
        self.rotary_emb = RotaryEmbeddings(spec, max_model_len)
        # rounded to the weights' dtype, as Gemma's is
        self.embed_scale = float(torch.tensor(spec.embed_scale, device="cpu"))
        self.step_lora: StepLora | None = None  # set if the server has adapters
        self.captures = spec.captures
        self.captured: list[torch.Tensor] = []  # for the last pass, `[T, H]` each, perhaps with more rows behind
        self._kept: list[torch.Tensor] = []
        self._ops: Ops | None = None  # None: layers are called one by one
        self._fused: FusedLayers | None = None  # built on first use: it holds addresses of the KV cache

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        """Return the class of all layers."""
        return BLOCKS[spec.form]

    @property
    def received_width(self) -> int:
        """Return the number of entries per token that this stage receives from the one before it."""
        return (1 + sum(layer < self._first_layer for layer in self.captures)) * self.spec.hidden_size

    @property
    def _first_layer(self) -> int:
        return int(next(iter(self.layers)))

    def use(self, ops: Ops) -> None:
        """Switch to a platform's operations."""
        self._ops, self._fused = ops if self.first and self.last and not self.rotary_emb.scales_queries else None, None

    def fused_layers(self) -> FusedLayers | None:
        """Return all layers as one call, or None if the platform does not support that."""
        if self._ops and (self._fused is None or not self._fused.fits(self.layers["0"])):
            layers = list(self.layers.values())
            tables = [self.rotary_emb.tables[layer.rope].cos_sin_cache if layer.rope else None for layer in layers]
            self._fused = self._ops.fused_layers(layers, self.norm, tables)
            self._ops = self._ops if self._fused else None
        return self._fused

    def embed(self, call: StageCall) -> torch.Tensor:
        """Return the input of the first layer, `[T, H]`."""
        x = self.embed_tokens(call.input_ids)
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        if call.images is not None:
            call.images.write(x)
        return x if self.spec.learned_positions is None else x + self.embed_positions(call.positions)

    def layer_calls(
        self, call: StageCall, inputs: torch.Tensor | None = None
    ) -> Iterator[tuple[DecoderLayer, LayerCall]]:
        """Yield each layer and the arguments of its call. `inputs` `[T, L, size]` are the layers' own."""
        rotations, last = self.rotary_emb(call.positions), len(self.layers) - 1
        for i, layer in enumerate(self.layers.values()):
            own = None if inputs is None else inputs[:, i]
            needed = call.needed_rows if i == last else None
            yield layer, LayerCall(rotations.get(layer.rope), call.attn, needed, own, call.encoded, call.cross_weights)

    def forward(self, call: StageCall) -> torch.Tensor:
        x, *before = [self.embed(call)] if self.first else call.hidden.split(self.spec.hidden_size, 1)
        x, residual = x.contiguous(), None
        images = call.images
        deep = images is not None and bool(images.deep)
        lora = self.step_lora if self.step_lora is not None and self.step_lora.applies else None
        fused = self.fused_layers() if call.positions.dim() == 1 and not deep and not self.captures else None
        if fused is not None and (lora is None or fused.takes(lora)):
            return fused.run(x, call.positions, call.attn, call.needed_rows, lora)
        self.captured = list(self._kept) or before
        for i, (layer, layer_call) in enumerate(self.layer_calls(call)):
            self.capture(self._first_layer + i, x, residual)
            x, residual = layer(x, residual, layer_call)
            if deep and not (self.last and i == len(self.layers) - 1):
                images.add_deep(x, i)
        if self.last:
            return self.norm.add(x, residual)[0]
        return torch.cat([x + residual, *self.captured], 1) if self.captures else x + residual

    def capture(self, layer: int, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Keep the residual stream before a layer if it is one of `captures`. Kernels may overwrite their inputs."""
        if layer not in self.captures:
            return
        stream = x if residual is None else x + residual
        if self._kept:
            self._kept[self.captures.index(layer)][: len(x)] = stream
        else:
            self.captured.append(stream.clone() if residual is None else stream)

    def keep_captured(self, max_num_tokens: int) -> None:
        """Keep the streams of `captures` at addresses that recorded passes write to."""
        if not self.captures:
            return
        weight = self.norm.weight
        self._kept = [weight.new_zeros(max_num_tokens, self.spec.hidden_size) for _ in self.captures]
        self.captured = list(self._kept)


class RotaryEmbeddings(nn.Module):
    """The rotary embeddings that the layers use, by name."""

    def __init__(self, spec: ModelSpec, max_model_len: int):
        super().__init__()
        layers = (*spec.layers, spec.mtp.layer) if spec.has_head else spec.layers
        used = {layer.rope: layer for layer in layers if layer.attends or layer.rope}
        self.tables = nn.ModuleDict(
            {
                name: RotaryEmbedding(
                    rope.head_dim, max_model_len, rope.theta, rope.scaling, rope.rotary_dim, rope.axes
                )
                for name, rope in spec.ropes.items()
                if name in used
            }
        )
        # layers without rotary embedding rotate by the angle 0
        half = used[None].head_dim // 2 if None in used else 0
        still = torch.tensor([[1.0] * half + [0.0] * half], dtype=torch.float32) if half else None
        self.register_buffer("still", still, persistent=False)
        scale = spec.still_query_scale if None in used else None
        if scale is not None:
            scale = still_query_scale(max_model_len, *scale)
        self.register_buffer("still_query_scale", scale, persistent=False)

    @property
    def scales_queries(self) -> bool:
        """Return whether queries of some layers are multiplied by a factor that depends on their position."""
        rotated = any(table.query_scale is not None for table in self.tables.values())
        return rotated or self.still_query_scale is not None

    def forward(self, positions: torch.Tensor) -> dict[str | None, Rotation]:
        """Return the rotations of tokens at `positions` `[T]` or `[3, T]`, by name; None is that of layers without
        rotary embedding.
        """
        rotations: dict[str | None, Rotation] = {name: table(positions) for name, table in self.tables.items()}
        if self.still is not None:
            scale = None if self.still_query_scale is None else self.still_query_scale[positions]
            rotations[None] = Rotation(self.still, positions.new_zeros(positions.shape[-1]), scale)
        return rotations


class CausalLM(ConfigReader, nn.Module):
    """A language model: call `model(input_ids, positions, attn)`, then `model.logits(hidden)` for the positions to
    sample.
    """

    # the family's names of tensors, and patterns of tensors that are not needed (`names.TensorNames`)
    renames: ClassVar[dict[str, str]] = {}
    ignored: ClassVar[tuple[str, ...]] = ()
    # patterns of the decoder's matrices that the checkpoint holds as [in, out]
    transposed: ClassVar[tuple[str, ...]] = ()
    prediction_head: ClassVar[type[nn.Module]] = PredictionHead  # of (spec, its index, format of its weights)
    # errors of single prompts of the last step, by batch position: only code of transformers fails for single prompts
    failures: Mapping[int, str] = MappingProxyType({})

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        self.spec, self.max_model_len, self.dtype = spec, max_model_len, torch.get_default_dtype()
        self.weight_format = weights
        self.model = self.make_decoder(spec, max_model_len, weights)
        self.pooler: Pooler | None = None  # None: requests for vectors are refused
        self.vision: VisionTower | None = None  # for the first stage, if the model reads images
        if self.model.last and spec.labels:
            self.score = self.make_classifier(spec)
        if self.model.last and spec.has_lm_head:
            name = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
            tied_to = getattr(self.model, "embed_tokens", None) if spec.tie_word_embeddings else None
            if spec.has_head:
                self.mtp = nn.ModuleList(self.prediction_head(spec, i, weights) for i in range(spec.mtp.count))
            self.lm_head = ParallelLMHead(spec.vocab_size, spec.hidden_size, name, tied_to, weights.head(name))

    @property
    def received_width(self) -> int:
        """See `Decoder.received_width`."""
        return self.model.received_width

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        """Build the layers."""
        return Decoder(spec, max_model_len, weights)

    def make_classifier(self, spec: ModelSpec) -> nn.Module:
        """Build the module that maps pooled hidden states to the logits of the labels."""
        return nn.Linear(spec.hidden_size, len(spec.labels), bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        hidden: torch.Tensor | None = None,
        needed_rows: torch.Tensor | None = None,
        images: ImageEmbeds | None = None,
        token_types: torch.Tensor | None = None,
        encoded: Encoded | None = None,
        cross_weights: CrossWeights | None = None,
    ) -> torch.Tensor:
        """Return the hidden states `[T, H]` after this stage's layers; the arguments are those of `StageCall`.

        With `needed_rows` the result is `[S, H]`, and the last layer computes only keys and values for other tokens.
        """
        return self.model(
            StageCall(input_ids, positions, attn, hidden, needed_rows, images, token_types, encoded, cross_weights)
        )

    def logits(self, hidden: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
        """Map hidden `[S, H]`, of the positions to sample, to `[S, vocab_size]` float32, possibly in `workspace`.

        On the last pipeline stage only.
        """
        logits, cap = self.lm_head(hidden, workspace), self.spec.logit_soft_cap
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def predict(
        self,
        next_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        depth: int = 0,
    ) -> torch.Tensor:
        """Map hidden states `[T, H]` of tokens at `positions`, and the tokens `[T]` that follow them by `depth` + 1
        places, to hidden states of head `depth`. `draft_logits` maps these to the logits of the tokens one place
        further.
        """
        head = self.mtp[depth]
        embedded = self.model.embed(StageCall(next_ids, positions, attn))
        return head(embedded, hidden, LayerCall(self.model.rotary_emb(positions).get(head.rope), attn))

    def draft_logits(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Map hidden states `[S, H]` of head `depth` to logits `[S, vocab_size]`."""
        return self.logits(self.mtp[depth].read(hidden))

    def read_by_heads(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that the first head reads after a pass that returned `hidden` `[T, H]`."""
        return hidden

    def rounded_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return `logits` in the model's dtype, if its head multiplies in it and nothing follows, else None."""
        plain = self.spec.logit_scale == 1.0 and self.spec.logit_soft_cap is None
        return self.lm_head.rounded_logits(hidden) if plain else None

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Map pooled hidden states `[P, H]` float32 to the classifier's logits `[P, num_labels]` float32."""
        if tokens := self.pooler.score_tokens:
            chosen = self.logits(pooled.to(self.dtype))[:, list(tokens)]
            return chosen[:, :1] - chosen[:, 1:].sum(1, keepdim=True)
        return torch.nn.functional.linear(pooled, self.score.weight.float())

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        """Return the all-reduces over the tensor-parallel ranks, in order, in a forward pass over `num_tokens` tokens
        in a single stage.
        """
        *layers, last = self.model.layers.values()
        embedding: list[Exchange] = [((num_tokens, self.spec.hidden_size), None)]
        middle = [exchange for layer in layers for exchange in layer.exchanges(num_tokens, num_tokens)]
        return embedding + middle + last.exchanges(num_tokens, num_needed)

    def largest(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return argmax of each row of `logits`, int64 `[S]`, or None if computing all logits is faster."""
        return self.lm_head.largest(hidden)

    def use(self, ops: Ops) -> None:
        """Switch to a platform's operations. Call `finalize` afterwards if the weights are loaded."""
        for module in self.modules():
            if module is not self and hasattr(module, "use"):
                module.use(ops)

    def finalize(self) -> None:
        """Give loaded weights to the platform's own methods.

        Called when the weights are loaded, and again after each later `use`.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.finalize()
        self.round_for_products()

    def round_for_products(self) -> None:
        """Let norms and activations attach their results in 8 bits where products, whose weights are loaded and packed,
        take that form.
        """
        for module in self.modules():
            if module is not self and hasattr(module, "round_for_products"):
                module.round_for_products()

    def tensor_names(self, names: Collection[str]) -> TensorNames:
        """Return the names of this model's tensors in files that hold the tensors `names`."""
        ignored = (*self.ignored, *unread_indexes(self.spec), *map(below, self.spec.tower_prefixes))
        renames = self.renames | (dict(self.spec.mtp.names) if self.spec.has_head else {})
        found = TensorNames(renames, ignored, transposed=self.transposed)
        return found.placed(names, "model.embed_tokens.weight")

    def has_elsewhere(self, name: str, names: TensorNames) -> bool:
        """Return whether another rank holds the checkpoint tensor `name`, or no rank does because the layer drafts
        tokens.
        """
        if (layer := names.layer(name)) is not None:
            if layer >= self.spec.num_hidden_layers:
                return any(self.spec.raw.get(key) for key in _DRAFTING) or names.drafts(layer)
            if str(layer) not in self.model.layers:
                return True
            mixtures = (part for part in self.model.layers[str(layer)].children() if isinstance(part, MoE))
            return any(moe.has_elsewhere(name, names) for moe in mixtures)
        first = () if self.model.first else self.model.of_first_stage
        last = () if self.model.last else (*self.model.of_last_stage, "lm_head", "score")
        return name.startswith(tuple(f"{names.in_file(module)}." for module in (*first, *last)))


def stage_layers(layers: Sequence[LayerSpec], rank: int, num_stages: int) -> range:
    """Return the layers of pipeline stage `rank`: 7 layers over 3 stages are 3, 2, 2. Layers whose cache others read
    are all on the last stage, as are these.

    A stage begins with a layer that does not use the choice of keys of an earlier one.

    Raises ValueError if there are more stages than layers that can be divided.
    """
    if any(layer.index and layer.index.source is not None for layer in layers):
        starts = [_own_index(layers, _stage(layers, i, num_stages).start) for i in range(num_stages)]
        if len(set(starts)) < num_stages:
            raise ValueError(too_many_stages(num_stages, len(layers), ", several of which use one choice of keys"))
        return range(starts[rank], [*starts, len(layers)][rank + 1])
    return _stage(layers, rank, num_stages)


def _own_index(layers: Sequence[LayerSpec], start: int) -> int:
    """Return the layer next to `start` that does not use the choice of keys of another; not a later one if layers share
    caches, which are on the last stage.
    """
    shares = any(layer.kv_from is not None for layer in layers)
    own = [i for i, layer in enumerate(layers) if layer.index is None or layer.index.source is None]
    return min((i for i in own if i <= start or not shares), key=lambda i: abs(i - start))


def _stage(layers: Sequence[LayerSpec], rank: int, num_stages: int) -> range:
    num_layers = len(layers)
    divisible = min((layer.kv_from for layer in layers if layer.kv_from is not None), default=num_layers - 1) + 1
    if num_stages > divisible:
        last = "" if divisible == num_layers else f", of which the last {num_layers - divisible + 1} share caches"
        raise ValueError(too_many_stages(num_stages, num_layers, last))
    first = divisible - 1  # the last stage begins here at the latest
    if num_stages == 1 or _even(num_layers, num_stages - 1, num_stages).start <= first:
        return _even(num_layers, rank, num_stages)
    return range(first, num_layers) if rank == num_stages - 1 else _even(first, rank, num_stages - 1)


def _even(num_layers: int, rank: int, num_stages: int) -> range:
    each, more = divmod(num_layers, num_stages)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))
