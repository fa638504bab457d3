"""Images and videos in the prompts of an offline `LLM`: vLLM's `multi_modal_data`, and parts of messages that hold
pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.server.media.inputs import MEDIA, MediaInput, MediaKind
from quire.server.values import Json

PICTURE = "image_pil"  # type of a part that holds a PIL.Image.Image
# of vLLM's metadata of a video: what the frames' rate follows from, and what the frames show themselves
_RATE = frozenset({"fps", "total_num_frames"})
_OTHERS = frozenset({"duration", "frames_indices", "video_backend", "do_sample_frames", "width", "height"})


def media_of_prompt(prompt: Mapping[str, Any]) -> list[MediaInput]:
    """Return the media in a prompt's "multi_modal_data", with their "multi_modal_uuids". Raises ValueError."""
    data = prompt.get("multi_modal_data") or {}
    if unknown := sorted(set(data) - {*MEDIA}):
        raise ValueError(f"multi_modal_data.{unknown[0]} is not supported, only image and video")
    uuids = prompt.get("multi_modal_uuids") or {}
    images = _inputs("image", _as_list(data.get("image")), _as_list(uuids.get("image")), picture_input)
    return images + _inputs("video", _videos(data.get("video")), _as_list(uuids.get("video")), video_input)


def _inputs(
    kind: MediaKind, given: list[Any], uuids: list[Any], make: Callable[[Any, str | None, str], MediaInput]
) -> list[MediaInput]:
    uuids = uuids or [None] * len(given)
    if len(uuids) != len(given):
        raise ValueError(f"multi_modal_uuids.{kind}: {len(uuids)} for {len(given)} {kind}s")
    return [
        make(one, uuid, f"multi_modal_data.{kind}.{i}") for i, (one, uuid) in enumerate(zip(given, uuids, strict=True))
    ]


def _as_list(value: object) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def picture_input(picture: object, uuid: str | None, path: str) -> MediaInput:
    """Return a PIL.Image.Image; None stands for one whose uuid is cached. Raises ValueError."""
    from PIL import Image

    if picture is None and uuid is None:
        raise ValueError(f"{path}: None needs a uuid")
    if picture is not None and not isinstance(picture, Image.Image):
        raise ValueError(f"{path} must be a PIL.Image.Image, not {type(picture).__name__}")
    return MediaInput(param=path, picture=picture, uuid=uuid)


def _videos(value: object) -> list[Any]:
    """Return the videos of `multi_modal_data`: one, or a list. A list of frames is one video."""
    if value is None:
        return []
    if not isinstance(value, list) or (value and _is_frame(value[0])):
        return [value]
    return value


def _is_frame(value: object) -> bool:
    return getattr(value, "ndim", None) == 3 or hasattr(value, "getexif")


def video_input(video: object, uuid: str | None, path: str) -> MediaInput:
    """Return frames: an array `[frames, height, width, 3]`, or a list of frames, alone or in a tuple with vLLM's
    metadata. None stands for a video whose uuid is cached. Raises ValueError.
    """
    if video is None:
        if uuid is None:
            raise ValueError(f"{path}: None needs a uuid")
        return MediaInput(param=path, kind="video", uuid=uuid)
    frames, about = video, {}
    if isinstance(video, tuple) and len(video) == 2 and isinstance(video[1], Mapping):
        frames, about = video
    from quire.server.media.video.sources import clip_of

    try:
        return MediaInput(param=path, kind="video", picture=clip_of(frames, _rate(frames, about)), uuid=uuid)
    except ValueError as error:
        raise ValueError(f"{path}{error}") from None


def _rate(frames: object, about: Mapping[str, Any]) -> float | None:
    """Return the frames per second of the given frames; `fps` in the metadata is that of all `total_num_frames`."""
    if unknown := sorted(set(about) - _RATE - _OTHERS):
        raise ValueError(f": unknown metadata {unknown[0]!r}; it may have {', '.join(sorted(_RATE | _OTHERS))}")
    if (fps := about.get("fps")) is None:
        return None
    num_frames = len(frames)
    total = about.get("total_num_frames") or num_frames
    if not isinstance(fps, int | float) or not fps > 0 or not isinstance(total, int) or total < num_frames:
        raise ValueError(f": fps must be above 0 and total_num_frames at least the {num_frames} frames")
    return num_frames / total * fps


def take_pictures(content: Json, path: str) -> tuple[Any, dict[int, MediaInput]]:
    """Return a message's content with an empty text for every picture in it, and the pictures by their place. Raises
    ValueError.
    """
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content, {}
    pictures: dict[int, MediaInput] = {}
    for i, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") == PICTURE:
            where = f"{path}.{i}"
            if unknown := sorted(set(part) - {"type", PICTURE, "uuid"}):
                raise ValueError(f"{where}.{unknown[0]} is not supported")
            pictures[i] = picture_input(part.get(PICTURE), part.get("uuid"), f"{where}.{PICTURE}")
    empty = {"type": "text", "text": ""}
    return [empty if i in pictures else part for i, part in enumerate(content)], pictures
