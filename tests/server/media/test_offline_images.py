"""Images with the offline `LLM`: in messages, as `multi_modal_data`, and more of them than memory holds at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from PIL import Image

from quire.configs.media_limits import read_media_limits
from quire.server.offline.llm import LLM
from quire.server.offline.params import SamplingParams
from tests.helpers.engine.fake_executor import BACKEND
from tests.server.media.conftest import FAKE, IMAGE_ID, NUM_TOKENS, data_url, image_part, picture, text_part

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def pil(color: str = "red", size: tuple[int, int] = (20, 10)) -> Image.Image:
    return Image.new("RGB", size, color)


@pytest.fixture(scope="module")
def llm(seeing_folder) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_EXECUTOR", FAKE)
        settings = {"limit_mm_per_prompt": '{"image": 2}', "mm_processor_cache_gb": 3e-5}
        with LLM(seeing_folder, distributed_executor_backend=BACKEND, max_model_len=256, **settings) as llm:
            yield llm


@pytest.fixture
def sent(llm, monkeypatch) -> list:
    """The requests that the engine gets."""
    requests, client = [], llm._runtime.state.client
    generate = client.generate
    monkeypatch.setattr(client, "generate", lambda request: (requests.append(request), generate(request))[1])
    return requests


def ask(llm: LLM, prompts, params: SamplingParams = SHORT):
    return llm.generate(prompts, params, use_tqdm=False)


def test_multi_modal_data(llm, sent):
    images = [pil("red"), pil("blue")]
    (output,) = ask(llm, {"prompt": "a<image>b<image>", "multi_modal_data": {"image": images}})
    ids = llm.tokenizer.encode(f"a{'<image>' * NUM_TOKENS}b{'<image>' * NUM_TOKENS}")
    assert output.prompt_token_ids == ids and output.prompt == "a<image>b<image>"
    assert len(output.outputs[0].token_ids) == 4
    (request,) = sent
    assert [item.offset for item in request.media] == [ids.index(IMAGE_ID), len(ids) - NUM_TOKENS]
    # one image need not be in a list, and has the key of the same pixels
    ask(llm, {"prompt": "<image>", "multi_modal_data": {"image": pil("blue")}})
    assert sent[-1].media[0].key == request.media[1].key
    # by a name, with and without its content
    named = {"prompt": "<image>", "multi_modal_uuids": {"image": ["sky"]}}
    ask(llm, named | {"multi_modal_data": {"image": [pil("blue")]}})
    ask(llm, named | {"multi_modal_data": {"image": [None]}})
    assert sent[-1].media[0].key == request.media[1].key


def test_prompts_with_and_without_images_keep_their_order(llm):
    prompts = ["a", {"prompt": "<image>", "multi_modal_data": {"image": pil()}}, [1, 2, 3], "b"]
    outputs = ask(llm, prompts)
    assert [output.prompt_token_ids.count(IMAGE_ID) for output in outputs] == [0, NUM_TOKENS, 0, 0]
    assert [output.prompt for output in outputs] == ["a", "<image>", None, "b"]


def test_more_images_than_memory_holds(llm, sent):
    """An image takes 12 KiB of the store's 31 KiB: two prompts run at once."""
    prompts = [{"prompt": f"{i}<image>", "multi_modal_data": {"image": pil(size=(20, 10 + i))}} for i in range(20)]
    outputs = ask(llm, prompts)
    assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
    assert len({request.media[0].key for request in sent}) == 20
    store = llm._runtime.state.images._store
    assert store.num_bytes <= store.max_bytes


def test_chat(llm, sent):
    content = [
        text_part("a"),
        image_part("red"),
        {"type": "image_pil", "image_pil": pil("blue"), "uuid": "sea"},
        text_part("b"),
    ]
    (output,) = llm.chat([{"role": "user", "content": content}], SHORT, use_tqdm=False, mm_processor_kwargs={})
    images = "<image>" * NUM_TOKENS
    text = f"<|im_start|>user\na{images}{images}b<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt == text and output.prompt_token_ids == llm.tokenizer.encode(text, False)
    ask(llm, {"prompt": "<image>", "multi_modal_data": {"image": pil("blue")}})
    assert sent[1].media[0].key == sent[0].media[1].key
    part = {"type": "image_url", "image_url": {"url": data_url(picture("lime"))}}
    conversations = [[{"role": "user", "content": [part]}], [{"role": "user", "content": "no image"}]]
    outputs = llm.chat(conversations, SHORT, use_tqdm=False)
    assert [output.prompt_token_ids.count(IMAGE_ID) for output in outputs] == [NUM_TOKENS, 0]


@pytest.mark.parametrize(
    "prompt, says",
    [
        ({"prompt": "<image>", "multi_modal_data": {"image": "a.png"}}, r"multi_modal_data.image.0 must be a PIL"),
        ({"prompt": "<image>", "multi_modal_data": {"image": None}}, None),
        ({"prompt": "<image>", "multi_modal_data": {"image": [None]}}, "needs a uuid"),
        ({"prompt": "<image>", "multi_modal_data": {"audio": []}}, "multi_modal_data.audio is not supported"),
        ({"prompt": "no", "multi_modal_data": {"image": pil()}}, "0 placeholders for 1 images"),
        ({"prompt": 3 * "<image>", "multi_modal_data": {"image": [pil()] * 3}}, "limit is 2"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": pil()}}, "given as text"),
        (
            {"prompt": "<image>", "multi_modal_data": {"image": pil()}, "mm_processor_kwargs": {"max_pixels": 1}},
            "no option 'max_pixels'",
        ),
        ({"prompt": "<image>", "multi_modal_data": {"image": pil()}, "multi_modal_uuids": {"image": ["a", "b"]}}, "2 "),
    ],
)
def test_refused_prompts(llm, prompt, says):
    if says is None:
        ask(llm, prompt)  # a text
        return
    with pytest.raises(ValueError, match=says):
        ask(llm, prompt)


@pytest.mark.parametrize(
    "part, says",
    [
        ({"type": "image_pil", "image_pil": "a.png"}, "messages.0.content.0.image_pil must be a PIL"),
        ({"type": "image_pil", "image_pil": pil(), "detail": "low"}, "detail is not supported"),
        ({"type": "image_url", "image_url": {"url": "file:///a.png"}}, "--allowed-local-media-path"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "video_url"),
    ],
)
def test_refused_parts(llm, part, says):
    with pytest.raises(ValueError, match=says):
        llm.chat([{"role": "user", "content": [part]}], SHORT, use_tqdm=False)


def test_embeddings_take_no_images(llm):
    with pytest.raises(ValueError, match="images are not supported"):
        llm.embed({"prompt": "<image>", "multi_modal_data": {"image": pil()}})


def test_only_images_and_videos_may_have_a_limit_above_0():
    assert read_media_limits('{"image": 3, "video": 0, "audio": {"count": 0}}') == {"image": 3, "video": 0}
    for wrong in ('{"audio": 1}', '{"image": 1, "audio": {"count": 2}}', '{"audio": {}}'):
        with pytest.raises(ValueError, match=r"audio is [12], but must be 0"):
            read_media_limits(wrong)
