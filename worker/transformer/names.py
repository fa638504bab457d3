"""Names of a checkpoint's tensors. Torch-free.

The decoder names its tensors as Llama does ("model.layers.0.self_attn.q_proj.weight"). A family may use other names
(`renames`), a wrapper puts its language model in another place (`_PLACES`), and some tensors of a file are not used
(`ignored`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from functools import cached_property

# where wrappers put the language model: (pattern, replacement) of the names that a family alone uses
_PLACES = (
    ("", ""),
    ("^", "language_model."),
    ("^", "thinker."),
    (r"^model\.", "model.language_model."),
    (r"^model\.", "language_model."),
    (r"^model\.", "model.text_model."),
    (r"^[a-z_]+\.(?!weight|bias)", ""),  # a bare model without its head
)
_IGNORED = (
    r"rotary_emb\.inv_freq$",  # old checkpoints contain these tables
    r"^(model\.)?mtp(_\w+)?\.",  # layers that draft tokens
    # encoders
    r"^((model|thinker)\.)?(vision_\w+|visual|merger|audio_\w+|multi_modal_projector|mm_\w+|embed_vision|embed_audio|"
    r"patch_merge_mlp|mlp1|sound_\w+|time_series|vit_large_projector|layerwise_projectors|spatial_projectors)\.",
    r"^(model\.)?image_newline$",
)


def below(prefix: str) -> str:
    """Return the pattern of names that begin with `prefix`, with "model." or "thinker." in front or without."""
    return rf"^((model|thinker)\.)?{re.escape(prefix.removeprefix('model.'))}"


class TensorNames:
    """Maps the decoder's names to those in the files."""

    def __init__(
        self,
        renames: Mapping[str, str] | None = None,
        ignored: tuple[str, ...] = (),
        place: tuple[str, str] = _PLACES[0],
        transposed: tuple[str, ...] = (),
    ):
        """Map by `renames` dotted parts of a name, e.g. {"mlp.up_proj": "mlp.c_fc"}, all at once and longest first.
        `ignored` are patterns of names in the files, `transposed` of the decoder's matrices that are [in, out] in them.
        """
        self.renames, self.ignored, self.place, self.transposed = dict(renames or {}), ignored, place, transposed
        self.files: Container[str] = ()  # names of the tensors in the files
        parts = "|".join(map(re.escape, sorted(self.renames, key=len, reverse=True)))
        self._parts = re.compile(rf"(?<![^.])(?:{parts})(?![^.])") if parts else None

    def in_file(self, name: str) -> str:
        """Return the name in the files of the decoder's tensor `name`."""
        if self._parts:
            name = self._parts.sub(lambda match: self.renames[match[0]], name)
        return re.sub(*self.place, name, count=1) if self.place[0] else name

    def modules(self, name: str) -> list[str]:
        """Return the names that files may have for the decoder's module `name`: the family's in every place, and its
        own.
        """
        family = self.in_file(f"{name}.weight").removesuffix(".weight")
        places = [re.sub(*place, family, count=1) if place[0] else family for place in _PLACES]
        return list(dict.fromkeys([*places, name]))

    def placed(self, names: Container[str], anchor: str) -> TensorNames:
        """Return these names in the place where the files, whose tensors are `names`, have the decoder's tensor
        `anchor`.
        """
        for place in _PLACES:
            found = TensorNames(self.renames, self.ignored, place, self.transposed)
            if found.in_file(anchor) in names:
                found.files = names
                return found
        self.files = names
        return self

    def tower_name(self, name: str) -> str:
        """Return the name in the files of a vision encoder's tensor, which some generations of files have below
        "model." or "thinker.", and older ones of SigLIP and CLIP in a further module.
        """
        bare = name.removeprefix("model.")
        deeper = re.sub(r"^vision_tower\.", "vision_tower.vision_model.", bare)
        candidates = (name, f"model.{bare}", bare, deeper, f"model.{deeper}", f"thinker.{bare}")
        return next((found for found in candidates if found in self.files), name)

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor of the files is not needed."""
        return any(re.search(pattern, name) for pattern in (*_IGNORED, *self.ignored))

    @cached_property
    def _layer(self) -> re.Pattern[str]:
        start, end = self.in_file("model.layers.#.").split("#")
        return re.compile(rf"{re.escape(start)}(\d+){re.escape(end)}")

    def layer(self, name: str) -> int | None:
        """Return the index of the layer to which a tensor of the files belongs."""
        match = self._layer.match(name)
        return int(match[1]) if match else None

    def drafts(self, layer: int) -> bool:
        """Return whether layer `layer` of the files drafts tokens: it reads a hidden state and an embedding."""
        return self.in_file(f"model.layers.{layer}.eh_proj.weight") in self.files
