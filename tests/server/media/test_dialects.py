"""Images in the other dialects, with the vendors' clients: what the engine gets, and what the client is told."""

from __future__ import annotations

import base64
import io
import json

import anthropic
import ollama
import openai
import pytest

from tests.helpers.server.running import MODEL, RunningServer, running_server
from tests.server.batches.test_batches import ended, results
from tests.server.media.conftest import (
    FAKE,
    IMAGE_ID,
    NUM_TOKENS,
    asks,
    data_url,
    image_part,
    picture,
    text_part,
)

RED, BLUE = picture("red"), picture("blue")
IMAGES = NUM_TOKENS * "<image>"


def prompt(seeing: RunningServer, request) -> str:
    """The prompt that the engine got, as text, without the answer's beginning."""
    text = seeing.state.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    return text.removesuffix("<|im_start|>assistant\n")


def keys(seeing: RunningServer, sent: list) -> list[str]:
    """The keys of a red and a blue image, as chat completions make them."""
    assert seeing.http.post("/v1/chat/completions", json=asks(image_part("red"), image_part("blue"))).status_code == 200
    return [item.key for item in sent.pop().media]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# ---- OpenAI's responses


def input_image(data: bytes, **fields) -> dict:
    return {"type": "input_image", "image_url": data_url(data), **fields}


def input_text(text: str) -> dict:
    return {"type": "input_text", "text": text}


def user(*parts: dict) -> dict:
    return {"role": "user", "content": list(parts)}


def test_responses(seeing, sent):
    red, blue = keys(seeing, sent)
    ask = user(input_text("a"), input_image(RED, detail="high"), input_text("b"), input_image(BLUE, detail="original"))
    answer = seeing.openai.responses.create(model=MODEL, input=[ask], max_output_tokens=4, instructions="look")
    (request,) = sent
    assert [item.key for item in request.media] == [red, blue]
    start = "<|im_start|>system\nlook<|im_end|>\n<|im_start|>user\n"
    assert prompt(seeing, request) == f"{start}a{IMAGES}b{IMAGES}<|im_end|>\n"
    usage = answer.usage
    assert usage.input_tokens == len(request.prompt_token_ids)
    assert usage.input_tokens_details.image_tokens == 2 * NUM_TOKENS
    counted = seeing.openai.responses.input_tokens.count(model=MODEL, input=[ask], instructions="look")
    assert counted.input_tokens == usage.input_tokens
    # the image comes with the conversation, from the store
    seeing.openai.responses.create(
        model=MODEL, input="and now?", previous_response_id=answer.id, max_output_tokens=4, instructions="look"
    )
    assert [item.key for item in sent[-1].media] == [red, blue]
    (item,) = seeing.openai.responses.input_items.list(answer.id).data
    assert item.content[1].image_url == data_url(RED)
    events = seeing.openai.responses.create(model=MODEL, input=[ask], max_output_tokens=4, stream=True)
    assert [event.type for event in events][-1] in ("response.completed", "response.incomplete")


def test_responses_leave_out_old_turns_with_their_images(seeing, sent):
    _, blue = keys(seeing, sent)
    turns = [
        user(input_image(RED), input_text("word " * 150)),
        {"role": "assistant", "content": "I see"},
        user(input_image(BLUE), input_text("word " * 100)),
    ]
    create = seeing.openai.responses.create
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        create(model=MODEL, input=turns, max_output_tokens=4)
    create(model=MODEL, input=turns, max_output_tokens=4, truncation="auto")
    assert [item.key for item in sent[-1].media] == [blue]
    assert sent[-1].prompt_token_ids.count(IMAGE_ID) == NUM_TOKENS


def test_outputs_of_functions(seeing, sent):
    """The template of this model prints no results: they are messages of the user."""
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [input_text("here"), input_image(RED)]}
    seeing.openai.responses.create(model=MODEL, input=[user(input_text("a")), call, output], max_output_tokens=4)
    assert len(sent[-1].media) == 1


@pytest.mark.parametrize(
    "part, param, says",
    [
        ({"type": "input_image"}, "input.0.content.0.image_url", "Missing"),
        ({"type": "input_image", "file_id": "file-1"}, "input.0.content.0.file_id", "not supported"),
        (input_image(b"no image"), "input.0.content.0.image_url", "known format"),
        ({"type": "input_image", "image_url": "http://elsewhere.example/"}, "input.0.content.0.image_url", "--allowed"),
        ({"type": "input_file", "file_data": "x"}, "input.0.content.0", "not supported"),
    ],
)
def test_refused_by_responses(seeing, part, param, says):
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        seeing.openai.responses.create(model=MODEL, input=[user(part)])
    assert refused.value.param.startswith(param)


# ---- Anthropic's messages


@pytest.fixture
def claude(seeing) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0, timeout=30)


def image_block(data: bytes) -> dict:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(data)}}


def test_messages(seeing, sent, claude):
    red, blue = keys(seeing, sent)
    url = {"type": "image", "source": {"type": "url", "url": data_url(BLUE)}, "cache_control": {"type": "ephemeral"}}
    blocks = [text_part("a"), text_part("b"), image_block(RED), text_part("c"), url]
    messages = [{"role": "user", "content": blocks}]
    answer = claude.messages.create(model=MODEL, max_tokens=4, messages=messages)
    (request,) = sent
    assert [item.key for item in request.media] == [red, blue]
    assert prompt(seeing, request) == f"<|im_start|>user\na\nb{IMAGES}c{IMAGES}<|im_end|>\n"
    usage = answer.usage
    num_cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert usage.input_tokens + num_cached == len(request.prompt_token_ids)
    assert claude.messages.count_tokens(model=MODEL, messages=messages).input_tokens == len(request.prompt_token_ids)
    with claude.messages.stream(model=MODEL, max_tokens=4, messages=messages) as stream:
        assert stream.get_final_message().usage.output_tokens == 4


@pytest.mark.parametrize(
    "block, says",
    [
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "@"}}, "not valid base64"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/heic", "data": "aaaa"}}, "media_type"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}, "known format"),
        ({"type": "image", "source": {"type": "url", "url": "http://elsewhere.example/"}}, "--allowed-media-domains"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "source"),
    ],
)
def test_refused_by_messages(seeing, claude, block, says):
    with pytest.raises(anthropic.BadRequestError, match=says) as refused:
        claude.messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": [block]}])
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert "messages.0.content" in refused.value.message


def test_messages_of_the_assistant_hold_no_images(claude):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [image_block(RED)]}]
    with pytest.raises(anthropic.BadRequestError, match="no image block"):
        claude.messages.create(model=MODEL, max_tokens=4, messages=messages)


# ---- results of tools, with a template that prints them


@pytest.fixture(scope="module")
def with_tools(seeing_folder) -> RunningServer:
    with running_server(seeing_folder, fake=FAKE, max_model_len="1024", generic_tool_prompt=True) as running:
        yield running.wait_ready()


TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("failed", [False, True])
def test_images_in_results_of_tools(with_tools, monkeypatch, failed):
    client, sent = with_tools.state.client, []
    generate = client.generate
    monkeypatch.setattr(client, "generate", lambda request: (sent.append(request), generate(request))[1])
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text_part("here"), image_block(RED)]}
    messages = [
        {"role": "user", "content": [image_block(BLUE), text_part("what is there?")]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
        {"role": "user", "content": [result | {"is_error": failed}, text_part("well?")]},
    ]
    claude = anthropic.Anthropic(base_url=with_tools.url, api_key="none", max_retries=0, timeout=30)
    claude.messages.create(model=MODEL, max_tokens=4, messages=messages, tools=[TOOL])
    call = {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "t1", "output": [input_text("here"), input_image(RED)]}
    items = [user(input_image(BLUE), input_text("what is there?")), call, output, user(input_text("well?"))]
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    with_tools.openai.responses.create(model=MODEL, input=items, tools=[tool], max_output_tokens=4)
    of_messages, of_responses = (prompt(with_tools, request) for request in sent)
    said = "Error: \nhere" if failed else "here"
    assert f"Result: {said}<|im_end|>\n<|im_start|>user\n{IMAGES}well?<|im_end|>" in of_messages
    assert f"Result: here<|im_end|>\n<|im_start|>user\n{IMAGES}well?<|im_end|>" in of_responses
    first, second = ([item.key for item in request.media] for request in sent)
    assert first == second and len(set(first)) == 2


# ---- Ollama


@pytest.fixture
def llama(seeing) -> ollama.Client:
    return ollama.Client(host=seeing.url, headers={"Authorization": "Bearer none"})


def test_ollama(seeing, sent, llama):
    red, blue = keys(seeing, sent)
    message = {"role": "user", "content": "what?", "images": [RED, b64(BLUE)]}
    answer = llama.chat(MODEL, [message], options={"num_predict": 4})
    (request,) = sent
    assert [item.key for item in request.media] == [red, blue]
    assert prompt(seeing, request) == f"<|im_start|>user\n{IMAGES}{IMAGES}what?<|im_end|>\n"
    assert answer.prompt_eval_count == len(request.prompt_token_ids)
    llama.generate(MODEL, "what?", images=[RED], options={"num_predict": 4})
    assert prompt(seeing, sent[-1]) == f"<|im_start|>user\n{IMAGES}what?<|im_end|>\n"
    llama.generate(MODEL, images=[RED], options={"num_predict": 4})
    assert prompt(seeing, sent[-1]) == f"<|im_start|>user\n{IMAGES}<|im_end|>\n"
    list(llama.generate(MODEL, "a<image>b", images=[BLUE], raw=True, stream=True, options={"num_predict": 4}))
    assert prompt(seeing, sent[-1]).endswith(f"a{IMAGES}b") and [item.key for item in sent[-1].media] == [blue]
    assert "vision" in llama.show(MODEL).capabilities


@pytest.mark.parametrize(
    "path, body, says",
    [
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["@"]}]}, "messages.0.images.0"),
        ("generate", {"prompt": "a", "images": [b64(RED), b64(b"none")]}, "images.1"),
        ("generate", {"prompt": "a", "raw": True, "images": [b64(RED)]}, "0 placeholders for 1 images"),
        ("chat", {"messages": [], "images": [b64(RED)]}, "images is not supported"),
    ],
)
def test_refused_by_ollama(seeing, path, body, says):
    answer = seeing.http.post(f"/api/{path}", json={"model": MODEL, **body})
    assert answer.status_code == 400 and says in answer.json()["error"], answer.text


# ---- models of text


def test_a_model_of_text_refuses_images_in_every_dialect(server):
    with pytest.raises(openai.BadRequestError, match="takes no images") as refused:
        server.openai.responses.create(model=MODEL, input=[user(input_image(RED))])
    assert refused.value.param == "input.0.content.0.image_url"
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match="takes no images") as refused:
        claude.messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": [image_block(RED)]}])
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    llama = ollama.Client(host=server.url)
    with pytest.raises(ollama.ResponseError, match="takes no images") as refused:
        llama.chat(MODEL, [{"role": "user", "content": "a", "images": [RED]}])
    assert refused.value.status_code == 400
    assert "vision" not in llama.show(MODEL).capabilities


# ---- batches


def test_lines_of_a_batch(seeing_folder, tmp_path):
    with running_server(seeing_folder, fake=FAKE, max_model_len="256", batch_dir=str(tmp_path)) as running:
        client = running.wait_ready().openai
        bodies = {
            "red": asks(text_part("a"), image_part("red")),
            "text": asks(text_part("a")),
            "damaged": asks({"type": "image_url", "image_url": {"url": data_url(b"none")}}),
        }
        lines = [
            {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
            for name, body in bodies.items()
        ]
        content = io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        options = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = ended(client, client.batches.create(input_file_id=file.id, **options).id)
        done = {line["custom_id"]: line["response"] for line in results(client, batch.output_file_id)}
        failed = {line["custom_id"]: line["response"] for line in results(client, batch.error_file_id)}
    assert set(done) == {"red", "text"} and set(failed) == {"damaged"}
    details = {name: answer["body"]["usage"]["prompt_tokens_details"] for name, answer in done.items()}
    assert details["red"]["image_tokens"] == NUM_TOKENS and "image_tokens" not in details["text"]
    assert failed["damaged"]["status_code"] == 400
    assert failed["damaged"]["body"]["error"]["param"] == "messages.0.content.0.image_url"
