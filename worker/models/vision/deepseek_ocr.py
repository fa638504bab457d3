"""The encoders of DeepSeek-OCR and Unlimited-OCR (SAM, then CLIP over its features) and of DeepSeek-OCR-2 (SAM, then a
Qwen 2 over its features and learned queries).

An image is a view of the whole, and tiles of a larger version of it. Embeddings of the tiles come first, then those of
the view, then a separator.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.models.vision.query_encoder import QueryEncoder, QuerySpec
from quire.worker.models.vision.sam import Sam, SamSpec, resized
from quire.worker.spec.vision import VisionSpec, read_image_token_id
from quire.worker.transformer.reader import text_part
from quire.worker.transformer.vision.layers import Encoder, EncoderSpec, LayerNames, linear, named, table
from quire.worker.transformer.vision.tower import VisionTower

_IMAGE_TOKEN_ID = 128815  # which the Hub's config.json does not name
_MAX_PIXELS = 4 << 20  # of the squares that are encoded at once
_CLIP_NAMES = LayerNames(qkv=("qkv_proj",))


class Clip(nn.Module):
    """Maps features `[B, rows, columns, C]` to the same shape: CLIP's layers over them instead of over patches."""

    def __init__(self, spec: EncoderSpec, side: int, prefix: str, weights: WeightFormat):
        super().__init__()
        size, embeddings = spec.hidden_size, f"{prefix}.embeddings"
        self.side = side
        self.class_embedding = table(f"{embeddings}.class_embedding", size)
        self.positions = table(f"{embeddings}.position_embedding.weight", side**2 + 1, size)
        self.norm = named(LayerNorm(size, spec.eps), f"{prefix}.pre_layrnorm")
        self.encoder = Encoder(spec, f"{prefix}.transformer.layers", weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, columns, size = x.shape
        of_class, of_grid = self.positions.split([1, self.side**2])
        x = x + resized(of_grid.view(1, self.side, self.side, size), (rows, columns))
        first = (self.class_embedding + of_class).expand(batch, 1, size)
        x = self.norm(torch.cat((first, x.flatten(1, 2)), 1))
        length = x.shape[1]
        x = self.encoder(x.flatten(0, 1), [length] * batch).view(batch, length, size)
        return x[:, 1:].view(batch, rows, columns, size)


class _Tower(VisionTower):
    """`features` of an image: `pixel_values`, the view `[1, side, side, 3]` as bytes, and for a larger image also
    `pixel_values_local`, the tiles `[n, side, side, 3]` row by row, and `grid`, their columns and rows.
    """

    patches_per_embed = 16  # of SAM

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        return VisionSpec(architecture, config, read_image_token_id({"image_token_id": _IMAGE_TOKEN_ID} | config))

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        projector = config.get("projector_config") or {}
        if projector.get("projector_type", "linear") != "linear":
            raise ValueError(f"projector_type {projector['projector_type']!r} is not supported; supported: linear")
        if config.get("tile_tag", "2D") != "2D":
            raise ValueError(f"tile_tag {config['tile_tag']!r} is not supported; supported: 2D")
        vision, size = config.get("vision_config") or {}, text_part(config)["hidden_size"]
        self.sam = Sam(self.sam_spec(vision), "model.sam_model", weights)
        self.projector = linear(self.make_encoder(vision, weights), size, "model.projector.layers", weights)
        self.separator = table("model.view_seperator", size)

    def sam_spec(self, vision: dict[str, Any]) -> SamSpec:
        """Return the sizes of SAM."""
        raise NotImplementedError

    def make_encoder(self, vision: dict[str, Any], weights: WeightFormat) -> int:
        """Build the encoder after SAM and return the size of its features."""
        raise NotImplementedError

    def encode_squares(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map squares `[B, 3, side, side]` to features `[B, ..., C]`."""
        raise NotImplementedError

    def arrange(self, squares: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
        """Map the embeddings of rows * columns squares, `[rows * columns, ..., H]`, to the rows of the result."""
        raise NotImplementedError

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        names = ("pixel_values_local", "pixel_values")
        squares = [image[name] for image in images for name in names if name in image]
        embedded = iter(self._embed(squares))
        result = []
        for image in images:
            parts = []
            if "pixel_values_local" in image:
                parts.append(self.arrange(next(embedded), *image["grid"].tolist()))
            result.append(torch.cat((*parts, self.arrange(next(embedded), 1, 1), self.separator.unsqueeze(0))))
        return result

    def _embed(self, squares: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the embeddings of each group of squares. Squares of one size are encoded together, in bounded batches.
        """
        groups: dict[int, list[int]] = {}
        for i, group in enumerate(squares):
            groups.setdefault(group.shape[1], []).append(i)
        result: list[torch.Tensor] = [torch.empty(0)] * len(squares)
        for side, members in groups.items():
            whole = torch.cat([squares[i] for i in members])
            batches = whole.split(max(1, _MAX_PIXELS // side**2))
            embedded = torch.cat([self._embed_batch(batch) for batch in batches])
            for i, part in zip(members, embedded.split([len(squares[i]) for i in members])):
                result[i] = part
        return result

    def _embed_batch(self, pixels: torch.Tensor) -> torch.Tensor:
        scaled = pixels.to(self.separator.device).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
        features = self.encode_squares(scaled.to(self.separator.dtype))
        return self.projector(features.flatten(0, -2)).view(*features.shape[:-1], -1)


class DeepseekOCRTower(_Tower):
    """A tower whose rows of embeddings end with one for the end of the row."""

    prefixes: ClassVar[tuple[str, ...]] = (
        "model.sam_model.",
        "model.vision_model.",
        "model.projector.",
        "model.image_newline",
        "model.view_seperator",
    )

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        self.newline = table("model.image_newline", text_part(config)["hidden_size"])

    def sam_spec(self, vision: dict[str, Any]) -> SamSpec:
        return sam_spec(vision, clip_spec(vision)[0].hidden_size)

    def make_encoder(self, vision: dict[str, Any], weights: WeightFormat) -> int:
        spec, side = clip_spec(vision)
        if spec.hidden_size != self.sam_spec(vision).channels[-1]:
            raise ValueError(f"CLIP's width {spec.hidden_size} must be the last of SAM's downsample_channels")
        self.clip = Clip(spec, side, "model.vision_model", weights)
        return 2 * spec.hidden_size

    def encode_squares(self, pixels: torch.Tensor) -> torch.Tensor:
        of_sam = self.sam(pixels)
        return torch.cat((self.clip(of_sam), of_sam), -1)

    def arrange(self, squares: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
        side, size = squares.shape[1], squares.shape[-1]
        grid = squares.view(rows, columns, side, side, size).transpose(1, 2).reshape(rows * side, columns * side, size)
        return torch.cat((grid, self.newline.expand(rows * side, 1, size)), 1).flatten(0, 1)


class DeepseekOCR2Tower(_Tower):
    prefixes: ClassVar[tuple[str, ...]] = (
        "model.sam_model.",
        "model.qwen2_model.",
        "model.projector.",
        "model.view_seperator",
    )

    def sam_spec(self, vision: dict[str, Any]) -> SamSpec:
        return sam_spec(vision, query_spec(vision).hidden_size)

    def make_encoder(self, vision: dict[str, Any], weights: WeightFormat) -> int:
        spec = query_spec(vision)
        self.encoder = QueryEncoder(spec, "model.qwen2_model", weights)
        return spec.hidden_size

    def encode_squares(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.sam(pixels).flatten(1, 2))

    def arrange(self, squares: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
        return squares.flatten(0, 1)


# A config.json gives sizes in two forms: the Hub's (`width`), which has only some of them, and transformers'
# (`sam_config` and `encoder_config`). Sizes that it does not give are those of the published models.


def sam_spec(vision: dict[str, Any], last_channels: int) -> SamSpec:
    """Return SAM's sizes; by default its last convolution has `last_channels` channels."""
    published = SamSpec()
    if "sam_config" in vision:
        given = vision["sam_config"]
        for key in ("qkv_bias", "use_abs_pos", "use_rel_pos"):
            if not given.get(key, True):
                raise ValueError(f"sam_config.{key} false is not supported")
        _check_activation("sam_config", given, "gelu")
        size = given.get("hidden_size", published.hidden_size)
        return SamSpec(
            hidden_size=size,
            num_layers=given.get("num_hidden_layers", published.num_layers),
            num_heads=given.get("num_attention_heads", published.num_heads),
            mlp_size=given.get("mlp_dim") or int(size * given.get("mlp_ratio", 4.0)),
            image_size=given.get("image_size", published.image_size),
            patch=given.get("patch_size", published.patch),
            window=given.get("window_size", published.window),
            global_layers=tuple(given.get("global_attn_indexes", published.global_layers)),
            neck_size=given.get("output_channels", published.neck_size),
            channels=tuple(given.get("downsample_channels") or (512, last_channels)),
            eps=given.get("layer_norm_eps", published.eps),
        )
    given = (vision.get("width") or {}).get("sam_vit_b") or {}
    size = given.get("width", published.hidden_size)
    return SamSpec(
        hidden_size=size,
        num_layers=given.get("layers", published.num_layers),
        num_heads=given.get("heads", published.num_heads),
        mlp_size=4 * size,
        image_size=vision.get("image_size", published.image_size),
        global_layers=tuple(given.get("global_attn_indexes", published.global_layers)),
        # DeepSeek-OCR-2's file has DeepSeek-OCR's channels, which its encoder does not
        channels=(given.get("downsample_channels", published.channels)[0], last_channels),
    )


def clip_spec(vision: dict[str, Any]) -> tuple[EncoderSpec, int]:
    """Return CLIP's sizes, and the side of the grid of its positions."""
    if "encoder_config" in vision:
        given = vision["encoder_config"]
        _check_activation("encoder_config", given, "quick_gelu")
        keys = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    else:
        given = (vision.get("width") or {}).get("clip-l-14-224") or {}
        keys = ("width", "layers", "heads")
    size, layers, heads = (given.get(key, default) for key, default in zip(keys, (1024, 24, 16)))
    inner, eps = given.get("intermediate_size", 4 * size), given.get("layer_norm_eps", 1e-5)
    spec = EncoderSpec(size, inner, layers, heads, "quick_gelu", eps, names=_CLIP_NAMES)
    return spec, given.get("image_size", 224) // given.get("patch_size", 14)


def query_spec(vision: dict[str, Any]) -> QuerySpec:
    """Return the sizes of DeepSeek-OCR-2's second encoder."""
    published = QuerySpec()
    if "encoder_config" not in vision:
        given = (vision.get("width") or {}).get("qwen2-0-5b") or {}
        return QuerySpec(hidden_size=given.get("dim", published.hidden_size))
    given = vision["encoder_config"]
    _check_activation("encoder_config", given, "silu")
    rope = given.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or given.get("use_sliding_window"):
        raise ValueError("encoder_config: scaled rotary embeddings and sliding windows are not supported")
    return QuerySpec(
        hidden_size=given.get("hidden_size", published.hidden_size),
        intermediate_size=given.get("intermediate_size", published.intermediate_size),
        num_layers=given.get("num_hidden_layers", published.num_layers),
        num_heads=given.get("num_attention_heads", published.num_heads),
        num_kv_heads=given.get("num_key_value_heads") or given.get("num_attention_heads", published.num_kv_heads),
        eps=given.get("rms_norm_eps", published.eps),
        theta=rope.get("rope_theta") or given.get("rope_theta", published.theta),
    )


def _check_activation(where: str, given: dict[str, Any], name: str) -> None:
    if (found := given.get("hidden_act", name)) != name:
        raise ValueError(f"{where}.hidden_act {found!r} is not supported; supported: {name}")
