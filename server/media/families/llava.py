"""Llava: one square of fixed size for each image, whose longer side is cut or padded."""

from __future__ import annotations

from typing import Any, ClassVar

from PIL import Image

from quire.server.media.families.pixtral import PixtralProcessor
from quire.server.media.pixels import PixelReader, one_side, padded_to_square
from quire.server.media.processor import ImageProcessor, ProcessedImage


class LlavaProcessor:
    placeholder: ClassVar[str] = "<image>"
    image_token = "<image>"
    options: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        vision = config["vision_config"]
        self.side, patch = vision.get("image_size", 224), vision.get("patch_size", 32)
        size = preprocessor.get("size") or {"shortest_edge": self.side}
        self.cuts = preprocessor.get("do_center_crop", True) and not (isinstance(size, dict) and "height" in size)
        self.pads = preprocessor.get("image_processor_type", "").startswith("Llava") and preprocessor.get(
            "do_pad", False
        )
        for name, value in (("size", size), ("crop_size", preprocessor.get("crop_size", self.side))):
            if (found := one_side(f"preprocessor_config.json: {name}", value)) != self.side:
                raise ValueError(f"preprocessor_config.json: {name} {found} must be the encoder's, {self.side}")
        has_class = vision.get("model_type") == "clip_vision_model"
        keeps_class = has_class and config.get("vision_feature_select_strategy", "default") == "full"
        self.tokens = (self.side // patch) ** 2 + keeps_class
        self.reader = PixelReader(preprocessor)

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        return [self.tokens] * len(sizes)

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        return [
            ProcessedImage(
                {"pixel_values": self.reader.numbers([self._square(image)])[0]}, self.image_token, [self.tokens]
            )
            for image in images
        ]

    def _square(self, image: Image.Image) -> Image.Image:
        if self.pads:
            image = padded_to_square(image, self.reader.mean)
        if not self.cuts:
            return self.reader.resize(image, self.side, self.side)
        short, long = sorted(image.size)
        longer = int(self.side * long / short)
        height, width = (self.side, longer) if image.width >= image.height else (longer, self.side)
        top, left = (height - self.side) // 2, (width - self.side) // 2
        return self.reader.resize(image, height, width).crop((left, top, left + self.side, top + self.side))


def llava_processor(config: dict[str, Any], preprocessor: dict[str, Any]) -> ImageProcessor:
    """Return the processor of `LlavaForConditionalGeneration`, whose encoder may be Pixtral's."""
    pixtral = config["vision_config"].get("model_type") == "pixtral"
    return (PixtralProcessor if pixtral else LlavaProcessor)(config, preprocessor)
