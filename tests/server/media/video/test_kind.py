"""A `VideoKind` measures by the header and preprocesses what can be decoded."""

from __future__ import annotations

import pytest

from quire.configs.serving import MediaConfig
from quire.server.errors import BadRequest, NotInstalled
from quire.server.media.inputs import MediaInput
from quire.server.media.kinds import Group
from quire.server.media.video import sources
from quire.server.media.video.kind import VideoKind
from quire.server.media.video.qwen_vl import Qwen3VLVideoProcessor
from tests.helpers.models.films import film

CONFIG = {"vision_config": {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}}
LIMITS = {"size": {"shortest_edge": 64, "longest_edge": 64 * 64}}


def group_of(data: bytes, **options) -> Group:
    kind = VideoKind(Qwen3VLVideoProcessor(CONFIG, LIMITS), 1, MediaConfig(), {})
    return Group(kind, [MediaInput(param="messages.0", kind="video")], options, bool(options), [data])


@pytest.mark.slow
def test_a_film_that_is_shorter_than_its_header_says(tmp_path):
    """The frames that there are; the text, the times and the tokens are theirs."""
    pytest.importorskip("av")
    options = {"form": "mov", "codec": "mjpeg", "pixels": "yuvj420p", "options": {"movflags": "faststart"}}
    whole = film(num_frames=40, path=str(tmp_path / "fast.mov"), **options)
    begin = whole.index(b"mdat")
    cut = group_of(whole[: begin + (len(whole) - begin) * 3 // 4])
    cut.kind.measure(cut)
    assert cut.num_tokens > 0 and cut.num_bytes > 0
    (found,) = cut.kind.process(cut)
    times = [float(one.split(" ")[0]) for one in found.text.split("<")[1:] if "seconds" in one]
    assert 5 <= max(times) < 9.75 and len(times) == len(found.parts)  # of 10 seconds


@pytest.mark.slow
def test_a_request_may_not_ask_for_more_than_the_server(tmp_path):
    pytest.importorskip("av")
    data = film()
    group = group_of(data, num_frames=2)
    group.kind.measure(group)
    more = group_of(data, size={"shortest_edge": 64 * 60000, "longest_edge": 64 * 90000})
    with pytest.raises(BadRequest, match="may only make videos smaller") as error:
        more.kind.measure(more)
    assert error.value.param == "mm_processor_kwargs"
    more.param = "media_io_kwargs"
    with pytest.raises(BadRequest, match=r"media_io_kwargs: a video .* \(--media-io-kwargs makes them larger"):
        more.kind.measure(more)
    more.kind.may_enlarge = True  # offline
    more.kind.measure(more)


def test_settings_of_the_server_are_checked_at_the_start():
    kind = VideoKind(Qwen3VLVideoProcessor(CONFIG, LIMITS), 1, MediaConfig(), {"fps": -1})
    with pytest.raises(ValueError, match=r"--media-io-kwargs or --mm-processor-kwargs: fps must be"):
        kind.check_defaults()


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    group = group_of(b"\x00\x00\x00\x18ftypisom")
    with pytest.raises(NotInstalled, match=r"messages.0: this server decodes no video files") as error:
        group.kind.measure(group)
    assert error.value.param == "messages.0"
