"""/v1/chat/completions through the openai SDK and by hand."""

from __future__ import annotations

import asyncio
import json
import random

import openai
import pytest

from quire.engine.messages import NO_COUNTS, SamplingParams
from quire.server.api.openai.objects import ChatChunkChoice, ChatDelta
from tests.helpers.engine.fake_executor import expected_tokens
from tests.helpers.models.checkpoints import VOCAB_SIZE
from tests.helpers.server.running import MODEL, running_server

HELLO = [{"role": "user", "content": "Hello"}]


def ask(server, **fields):
    extra = fields.pop("extra_body", {})
    return server.openai.chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "max_tokens": 8, "seed": 1} | fields, extra_body=extra
    )


def post(server, **fields):
    return server.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 8, "seed": 1} | fields)


def events(response) -> list[dict | str]:
    """The data of every event of a stream, without comments."""
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def reference(server, prompt_ids: list[int], seed: int, max_tokens: int, **fields) -> list[int]:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, eos_token_ids=[2, 0], **fields)
    return expected_tokens(prompt_ids, sampling, 512, VOCAB_SIZE)


# ---- answers


def test_answer(server):
    answer = ask(server, extra_body={"return_token_ids": True})
    prompt_ids = answer.prompt_token_ids
    assert (
        server.state.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    choice = answer.choices[0]
    assert choice.token_ids == reference(server, prompt_ids, 1, 8)
    assert (
        choice.message.content == server.state.tokenizer.decode(choice.token_ids) and choice.message.role == "assistant"
    )
    assert (choice.finish_reason, choice.stop_reason, choice.index, choice.logprobs) == ("length", None, 0, None)
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint == server.state.system_fingerprint
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        len(prompt_ids),
        8,
        len(prompt_ids) + 8,
    )
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_async_client(server):
    async def main():
        async with server.aopenai() as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, seed=i) for i in range(8))
            )
            stream = await client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=8, seed=3, stream=True
            )
            return answers, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    answers, streamed = asyncio.run(main())
    assert len({answer.id for answer in answers}) == 8 and streamed == answers[3].choices[0].message.content


@pytest.mark.parametrize("model", [MODEL, "alias", "", None])
def test_names_of_the_model(server, model):
    assert post(server, model=model).json()["model"] == MODEL


def test_unknown_model(server):
    with pytest.raises(openai.NotFoundError) as caught:
        ask(server, model="gpt-9")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_stream_and_whole_give_the_same(server):
    rng = random.Random(5)
    for i in range(12):
        message = [{"role": "user", "content": "".join(rng.choice("abc é🙂 ") for _ in range(rng.randint(1, 40)))}]
        fields = {
            "messages": message,
            "seed": i,
            "max_tokens": rng.randint(1, 60),
            "n": rng.choice([1, 1, 3]),
            "stop": rng.choice([None, ["e", "of"], "\n"]),
            "logprobs": rng.choice([True, False]),
        }
        whole = ask(server, **fields)
        texts, finish, logprobs = {}, {}, {}
        for chunk in ask(server, **fields, stream=True):
            choice = chunk.choices[0]
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            finish[choice.index] = choice.finish_reason or finish.get(choice.index)
            if choice.logprobs:
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.content)
        for choice in whole.choices:
            assert texts[choice.index] == choice.message.content and finish[choice.index] == choice.finish_reason
            assert (choice.logprobs.content if choice.logprobs else []) == logprobs.get(choice.index, [])


def test_shape_of_a_stream(server):
    response = post(server, stream=True, stream_options={"include_usage": True}, n=2)
    assert (
        response.headers["content-type"] == "text/event-stream; charset=utf-8"
        and response.headers["cache-control"] == "no-cache"
    )
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert {(c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], MODEL, "chat.completion.chunk", server.state.system_fingerprint)
    }
    usage = chunks.pop()
    assert (
        usage["choices"] == []
        and usage["usage"]["completion_tokens"] == 16
        and "cached_tokens" in usage["usage"]["prompt_tokens_details"]
    )
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""} and mine[0]["finish_reason"] is None
        assert mine[-1]["delta"] == {} and mine[-1]["finish_reason"] == "length"
        assert all(choice["finish_reason"] is None and set(choice["delta"]) == {"content"} for choice in mine[1:-1])


def test_no_usage_unless_asked(server):
    chunks = events(post(server, stream=True))[:-1]
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_continuous_usage(slow_server):
    chunks = events(
        post(slow_server, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    )[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 8 and len(set(counts)) > 4
    assert all(
        chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + chunk["usage"]["completion_tokens"]
        for chunk in chunks
    )


def test_template_of_a_chunk_is_the_types_encoding(server):
    """The manually joined bytes of the common chunk equal msgspec's encoding of the Struct."""
    from quire.server.api.openai.chat import ChatAnswer
    from quire.server.api.openai.protocol import ChatCompletionRequest
    from quire.server.http.parse_body import parse
    from quire.server.request.delta import Delta
    from quire.server.request.generation_request import GenerationRequest

    for options in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        body, _ = parse(json.dumps({"messages": HELLO, **options}).encode(), ChatCompletionRequest)
        chat = ChatAnswer(body, server.state, "chatcmpl-x", GenerationRequest("x", [1], SamplingParams()))
        chat.started.add(3)
        for text in ("plain", 'quo"te \\ \n\t\x00 é🙂 \u2028 </script>'):
            fast = chat.frame(Delta(3, text, [5], None, None, None, None, NO_COUNTS, None))
            slow = chat.event([ChatChunkChoice(3, ChatDelta(content=text))])
            assert json.loads(fast[6:]) == json.loads(slow[6:]) and fast.endswith(b"}\n\n") and fast.count(b"\n") == 2


# ---- parameters


def test_n_choices_differ_and_share_the_prompt(server):
    content = "A long enough prompt to fill several blocks of the cache. " * 4
    answer = ask(server, messages=[{"role": "user", "content": content}], n=3, extra_body={"return_token_ids": True})
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.token_ids == reference(server, answer.prompt_token_ids, 1 + choice.index, 8)
    assert answer.usage.completion_tokens == 24 and answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    # a prefix hit of the second choice on the first does not count for the request
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    again = ask(server, messages=[{"role": "user", "content": content}], n=3)
    assert 0 < again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens


def test_cache_salt_keeps_prefixes_apart(server):
    message = [{"role": "user", "content": "salted and long enough for a few blocks " * 5}]
    cached = [
        ask(server, messages=message, extra_body={"cache_salt": salt}).usage.prompt_tokens_details.cached_tokens
        for salt in ("a", "b", "a")
    ]
    assert cached[0] == cached[1] == 0 < cached[2]


def test_stop_strings(server):
    text = ask(server, max_tokens=40).choices[0].message.content
    stop = text[10:13]
    cut = ask(server, max_tokens=40, stop=["never there", stop, *[f"#{i}#" for i in range(20)]])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", stop)
    kept = ask(server, max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == text[: text.index(stop) + len(stop)]
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in ask(server, max_tokens=40, stop=stop, stream=True)
    )
    assert streamed == cut.choices[0].message.content


def test_stop_tokens_and_min_tokens(server):
    ids = ask(server, max_tokens=20, extra_body={"return_token_ids": True}).choices[0].token_ids
    stop_id = ids[6]
    first = ids.index(stop_id)
    answer = ask(server, max_tokens=20, extra_body={"stop_token_ids": [stop_id], "return_token_ids": True})
    assert answer.choices[0].token_ids == ids[: first + 1] and (
        answer.choices[0].finish_reason,
        answer.choices[0].stop_reason,
    ) == ("stop", stop_id)
    assert answer.usage.completion_tokens == first + 1


def test_max_tokens_absent_is_all_that_is_left(server):
    answer = post(server, max_tokens=None, ignore_eos=True).json()
    assert answer["usage"]["total_tokens"] == 512 and answer["choices"][0]["finish_reason"] == "length"
    clipped = post(server, max_tokens=None, max_completion_tokens=510, ignore_eos=True).json()
    assert clipped["usage"]["total_tokens"] == 512


def test_too_long_a_prompt(server):
    for content in ("word " * 2000, "x" * 200_000):  # the second is refused before it is tokenized
        with pytest.raises(openai.BadRequestError) as caught:
            ask(server, messages=[{"role": "user", "content": content}])
        assert (
            caught.value.code == "context_length_exceeded"
            and caught.value.param == "messages"
            and "512 tokens" in caught.value.message
        )


def test_truncation(server):
    message = [{"role": "user", "content": "word " * 2000}]
    ids = post(server, messages=message, truncate_prompt_tokens=50, return_token_ids=True).json()["prompt_token_ids"]
    full = server.state.tokenizer.encode(
        "<|im_start|>user\n" + "word " * 2000 + "<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    assert ids == full[-50:]
    assert (
        post(
            server, messages=message, truncate_prompt_tokens=50, truncation_side="right", return_token_ids=True
        ).json()["prompt_token_ids"]
        == full[:50]
    )
    filled = post(server, messages=message, truncate_prompt_tokens=-1).json()
    assert filled["usage"] | {"prompt_tokens_details": 0, "completion_tokens_details": 0} == {
        "prompt_tokens": 504,
        "completion_tokens": 8,
        "total_tokens": 512,
        "prompt_tokens_details": 0,
        "completion_tokens_details": 0,
    }


def test_logprobs(server):
    answer = ask(server, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True})
    content, tokenizer = answer.choices[0].logprobs.content, server.state.tokenizer
    assert [entry.token for entry in content] == [tokenizer.id_to_token(i) for i in answer.choices[0].token_ids]
    assert b"".join(bytes(entry.bytes) for entry in content) == b"".join(
        tokenizer.token_bytes(i) for i in answer.choices[0].token_ids
    )
    for entry, token_id in zip(content, answer.choices[0].token_ids):
        assert entry.logprob == -0.5 and [top.token for top in entry.top_logprobs] == [
            tokenizer.id_to_token(i % VOCAB_SIZE) for i in (token_id, token_id + 1)
        ]
    assert all(entry.top_logprobs == [] for entry in ask(server, logprobs=True).choices[0].logprobs.content)
    as_ids = (
        ask(server, logprobs=True, top_logprobs=1, extra_body={"return_tokens_as_token_ids": True})
        .choices[0]
        .logprobs.content
    )
    assert [entry.token for entry in as_ids] == [f"token_id:{i}" for i in answer.choices[0].token_ids] and as_ids[
        0
    ].top_logprobs[0].token == as_ids[0].token


def test_prompt_logprobs(server):
    answer = post(server, prompt_logprobs=1, return_token_ids=True).json()
    entries, ids = answer["prompt_logprobs"], answer["prompt_token_ids"]
    assert entries[0] is None and len(entries) == len(ids)
    for token_id, entry in zip(ids[1:], entries[1:]):
        assert entry[str(token_id)]["rank"] == 1 and entry[str(token_id)][
            "decoded_token"
        ] == server.state.tokenizer.id_to_token(token_id)


def test_token_ids_in_a_stream(server):
    whole = post(server, return_token_ids=True).json()
    chunks = events(post(server, stream=True, return_token_ids=True))[:-1]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] and all(
        "prompt_token_ids" not in chunk for chunk in chunks[1:]
    )
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == whole["choices"][0]["token_ids"]


# ---- the template


def rendered(server, **fields) -> str:
    ids = post(server, return_token_ids=True, **fields).json()["prompt_token_ids"]
    return server.state.tokenizer.decode(ids, skip_special_tokens=False)


def test_generation_prompt_and_continuation(server):
    assert rendered(server, add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"
    messages = [*HELLO, {"role": "assistant", "content": "The answer"}]
    assert rendered(server, messages=messages, continue_final_message=True).endswith(
        "<|im_start|>assistant\nThe answer"
    )
    for fields in (
        {"messages": messages, "continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": True},
    ):
        answer = post(server, **fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "continue_final_message"


def test_messages_reach_the_template(server):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "refusal": "No."},
    ]
    assert rendered(server, messages=messages) == (
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages.1.role"),
        ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages.1.role"),
        ({"messages": [*HELLO, {"role": "function", "name": "f", "content": "x"}]}, "messages.1.role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages.0.content.0.type"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ({"priority": 1}, "priority"),
        ({"max_tokens": 513}, "max_tokens"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"tools": [{}]}, "tools.0.type"),
    ],
)
def test_refused(server, fields, param):
    answer = post(server, **fields)
    assert (
        answer.status_code == 400
        and answer.json()["error"]["param"] == param
        and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    )


def test_trusted_template_of_the_request(model_folder):
    with running_server(model_folder, trust_request_chat_template=True) as server:
        server.wait_ready()
        template = (
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}{% for d in documents or [] %}{{ d.title "
            "}}{% endfor %}"
        )
        assert (
            rendered(server, chat_template=template, chat_template_kwargs={"mood": "!"}, documents=[{"title": "T"}])
            == "Hello!T"
        )
        for bad in (
            "{{",
            "{{ raise_exception('no') }}",
            "{{ messages.nothing.x }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        ):
            answer = post(server, chat_template=bad)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
