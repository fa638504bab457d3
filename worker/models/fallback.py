"""Models that quire has no file for, computed by transformers over quire's paged attention, scheduler, prefix cache and
linear layers. Imported only for such a model.

All requests of a step are one sequence of tokens with their positions; our attention, which knows where requests begin,
takes the place of transformers'. Weights are read by transformers, which knows the names in the files of each family.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from quire.worker.attention.base import GroupedMetadata
from quire.worker.host.huge_pages import Workspace, drop_mapped, mappings_of
from quire.worker.layers.attention import Attention
from quire.worker.layers.linear import PLAIN_WEIGHTS, Linear, LinearMethod, WeightFormat
from quire.worker.models.fallback_spec import NAME, Attend, attending, base_of, first_states, make_model
from quire.worker.models.fallback_states import StatePasses
from quire.worker.platforms.ops import Ops
from quire.worker.spec.model import ModelSpec

_LOG = logging.getLogger(__name__)


class TransformersLM(nn.Module):
    """A causal language model of transformers, on one rank. The interface is that of `decoder.CausalLM`."""

    received_width: ClassVar = 0  # there is one pipeline stage
    failures: Mapping[int, str] = MappingProxyType({})  # see `decoder.CausalLM`

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        self.spec, self.max_model_len, self.weights = spec, max_model_len, weights
        self.dtype, self.device = torch.get_default_dtype(), torch.get_default_device()
        self.ops: Ops | None = None
        attending_layers = [(i, layer) for i, layer in enumerate(spec.layers) if layer.attends]
        self.attention = nn.ModuleList(
            Attention(
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                i,
                layer.window,
                layer.scale,
                layer.soft_cap,
                layer.v_head_dim,
            )
            for i, layer in attending_layers
        )
        with torch.device("meta"):  # `load` makes weights
            self._adopt(make_model(spec.folder))
            self.passes = self._make_passes() if spec.has_states else None
        self.states = self.passes.pages if self.passes else None

    def _adopt(self, inner: transformers.PreTrainedModel) -> None:
        """Use the weights of `inner`."""
        for parameter in inner.parameters():
            parameter.requires_grad_(False)
        swap_linears(inner, self.weights)
        self.inner = inner
        self._head = _head_of(inner)

    def _make_passes(self) -> StatePasses:
        """Return what computes the steps of a model with states. The model has no memory yet."""
        _LOG.warning(
            "%s keeps a state per request, and transformers computes it: one request after another, and all but their "
            "first tokens one by one, so expect it to be slow",
            self.spec.architecture,
        )
        model = make_model(self.spec.folder)
        model.set_experts_implementation(f"{NAME}_meta")
        held = first_states(model, lambda _, q, k, v, *__: q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]))
        return StatePasses(model.config, held)

    def load(self, folder: str, load_format: str, seed: int, progress: Callable[[float], None] | None) -> None:
        """Read the weights of `folder`, or make random ones if `load_format` is dummy."""
        options = {"dtype": self.dtype, "attn_implementation": NAME}
        if load_format == "dummy":
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            with torch.random.fork_rng(), torch.device(self.device):
                torch.manual_seed(seed)
                inner = transformers.AutoModelForCausalLM.from_config(config, **options)
        else:
            inner = transformers.AutoModelForCausalLM.from_pretrained(folder, **options, local_files_only=True)
        self._adopt(inner.to(self.device).eval())
        if self.ops is not None:
            self.use(self.ops)
        self._own_weights(folder, progress)

    def _own_weights(self, folder: str, progress: Callable[[float], None] | None) -> None:
        """Copy or repack the weights that are still views of mapped files, and give these back layer by layer: pages
        that were read stay resident otherwise.
        """
        mapped, modules = mappings_of(Path(folder).glob("*.safetensors")), list(self.inner.modules())
        # first those that are not repacked: the embedding may be the weight of the head, too
        for i, module in enumerate(sorted(modules, key=lambda module: isinstance(module, Linear))):
            views = [p for p in module.parameters(recurse=False) if any(p.data_ptr() in at for at in mapped)]
            weights = [view.data for view in views]
            if isinstance(module, Linear):
                module.finalize()
            else:
                for view in views:
                    view.data = view.data.clone()
            kept = {parameter.data_ptr() for parameter in module.parameters(recurse=False)}
            for weight in weights:
                if weight.data_ptr() not in kept:
                    drop_mapped(weight)
            if progress and 100 * (i + 1) // len(modules) > 100 * i // len(modules):
                progress((i + 1) / len(modules))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        hidden: torch.Tensor | None = None,
        needed_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map input_ids and positions `[T]` to hidden states `[T, H]`, or to those of `needed_rows`."""
        if self.passes is not None:
            hidden_states = self.passes.run(
                base_of(self.inner), input_ids, positions, attn, lambda metas: attending(self._attend(metas))
            )
        else:
            with attending(self._attend(attn)):
                hidden_states = base_of(self.inner)(
                    input_ids=input_ids[None].long(), position_ids=positions[None], use_cache=False
                ).last_hidden_state[0]
        return hidden_states if needed_rows is None else hidden_states[needed_rows]

    def _attend(self, attn: GroupedMetadata) -> Attend:
        """Return the attention of one pass over all layers."""
        layers = iter(self.attention)

        def attend(
            module: nn.Module,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            scaling: float | None,
            others: dict[str, Any],
        ) -> torch.Tensor:
            layer = next(layers)
            layer.sinks = others.get("s_aux")
            q, k, v = (heads[0].transpose(0, 1).contiguous() for heads in (q, k, v))
            return layer(q, k, v, attn[layer.cache_group]).view(1, len(q), layer.num_heads, -1)

        return attend

    def rounded_logits(self, hidden: torch.Tensor) -> None:
        """Return None: `logits` are float32."""

    def logits(self, hidden: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
        """Map hidden `[S, H]` to `[S, vocab_size]` float32."""
        base_of(self._head).hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)  # some models look at their shape
        return self._head(input_ids=ids, use_cache=False).logits[0].float()

    def largest(self, hidden: torch.Tensor) -> None:
        """Return the argmax of `logits`: not faster than computing them."""
        return None

    def use(self, ops: Ops) -> None:
        """Switch to a platform's operations. Call `finalize` afterwards if the weights are loaded."""
        self.ops = ops
        for module in self.modules():
            if module is not self and isinstance(module, Linear):
                module.use(ops)

    def round_for_products(self) -> None:
        """Leave the norms as they are: those of transformers round nothing."""

    def finalize(self) -> None:
        """Give loaded weights to the platform's own methods."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.finalize()


class _Output(tuple[torch.Tensor]):
    """Hidden states as a model's output, whose other fields are None."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _KnownLayers(nn.Module):
    """Stands for the layers `known` of a model whose `hidden` states are known."""

    hidden: torch.Tensor

    def __init__(self, known: nn.Module):
        super().__init__()
        self._known = [known]  # a list, so that it is not a part

    def __getattr__(self, name: str) -> Any:
        """Return a number that some models keep next to their layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._known[0], name)

    def forward(self, *args: Any, **options: Any) -> _Output:
        return _Output((self.hidden,))

    @property
    def decoder(self) -> _KnownLayers:  # some models give a part of theirs that name
        return self


def _head_of(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Return `model` without its layers: it computes logits, in its family's way, from given hidden states."""
    head = copy.copy(model)
    head._modules = dict(model._modules) | {model.base_model_prefix: _KnownLayers(base_of(model))}
    return head


class SwappedLinear(Linear):
    """A linear layer of transformers with one of our methods."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, method: LinearMethod):
        super().__init__(weight.shape[1], weight.shape[0], False, method, weight)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def swap_linears(model: nn.Module, weights: WeightFormat) -> None:
    """Replace the linear layers of `model`, whose weights are kept."""
    for path, parent in model.named_modules():
        for name, layer in parent.named_children():
            prefix = f"{path}.{name}".removeprefix(".")
            if type(layer) is nn.Linear:
                weight = layer.weight
            elif type(layer) is Conv1D:
                weight = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)
            else:
                continue
            method = weights.head(prefix) if name == "lm_head" else weights.linear(prefix)
            setattr(parent, name, SwappedLinear(weight, layer.bias, method))
