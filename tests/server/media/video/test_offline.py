"""Videos of the offline `LLM`: arrays, lists of frames, and vLLM's tuples with metadata."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from quire import LLM, SamplingParams
from tests.server.media.test_offline_images import BACKEND
from tests.server.media.video.test_requests import IMAGE_ID, VIDEO_ID, jpegs, write_model

SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
FRAMES = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), np.uint8)


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> Iterator[LLM]:
    folder = write_model(tmp_path_factory.mktemp("offline"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_EXECUTOR", f"images={IMAGE_ID}/{VIDEO_ID}:4096:1024")
        with LLM(folder, distributed_executor_backend=BACKEND, max_model_len=512) as llm:
            yield llm


@pytest.fixture
def sent(llm, monkeypatch) -> list:
    requests, client = [], llm._runtime.state.client
    generate = client.generate
    monkeypatch.setattr(client, "generate", lambda request: (requests.append(request), generate(request))[1])
    return requests


def ask(llm: LLM, video: object, text: str = "a<|video_pad|>b", **data):
    return llm.generate({"prompt": text, "multi_modal_data": {"video": video, **data}}, SHORT, use_tqdm=False)[0]


def test_forms_of_a_video(llm, sent):
    """All frames are used, in pairs of 4 tokens, and the same frames are the same video."""
    forms = [FRAMES, list(FRAMES), [Image.fromarray(frame) for frame in FRAMES], [FRAMES], (FRAMES, {})]
    for form in forms:
        output = ask(llm, form)
        assert output.prompt_token_ids.count(VIDEO_ID) == 12
    assert len({tuple(item.key for item in request.media) for request in sent}) == 1
    assert [item.time for item in sent[0].media] == [None, 2, 4]  # as the model sees videos: 2 frames a second


def test_the_rate_of_the_frames(llm, sent):
    """Those of 60 frames at 10 a second, of which 6 were chosen: one a second."""
    ask(llm, (FRAMES, {"fps": 10.0, "total_num_frames": 60, "duration": 6.0, "video_backend": "opencv"}))
    assert [item.time for item in sent[0].media] == [None, 4, 8]
    ask(llm, FRAMES)
    assert sent[0].media[0].key != sent[1].media[0].key


def test_videos_and_images_together(llm, sent):
    images = [Image.new("RGB", (16, 16))]
    output = ask(llm, [FRAMES, FRAMES[:2]], "<|video_pad|>x<|image_pad|>y<|video_pad|>", image=images)
    assert output.prompt_token_ids.count(VIDEO_ID) == 16 and output.prompt_token_ids.count(IMAGE_ID) == 4
    assert [sent[0].prompt_token_ids[item.offset] for item in sent[0].media] == [VIDEO_ID] * 3 + [IMAGE_ID, VIDEO_ID]


def test_a_chat(llm, sent):
    part = {"type": "video_url", "video_url": {"url": jpegs("red", "blue")}}
    (output,) = llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "?"}]}], SHORT, use_tqdm=False)
    assert output.prompt_token_ids.count(VIDEO_ID) == 4


@pytest.mark.parametrize(
    ("video", "says"),
    [
        ("a.mp4", "must be frames as an array of uint8"),
        (FRAMES.astype(np.float32), "must be frames as an array of uint8"),
        (FRAMES[:0], "must be frames"),
        (FRAMES[..., :1], "must be frames"),
        ((FRAMES, {"fps": 0}), "fps must be above 0"),
        ((FRAMES, {"fps": 2, "total_num_frames": 3}), "at least the 6 frames"),
        ((FRAMES, {"rate": 2}), "unknown metadata 'rate'"),
        ([None], "None needs a uuid"),
        ([FRAMES, FRAMES], "1 placeholders for 2 videos"),
    ],
)
def test_refused(llm, video, says):
    with pytest.raises(ValueError, match=says):
        ask(llm, video)
