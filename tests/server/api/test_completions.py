"""/v1/completions through the openai SDK and by hand."""

from __future__ import annotations

import json

import openai
import pytest

from quire.engine.messages import NO_COUNTS, SamplingParams
from quire.server.turns.fair_queue import Turns
from tests.helpers.models.checkpoints import VOCAB_SIZE
from tests.helpers.server.running import MODEL
from tests.server.api.test_chat import events, reference


def ask(server, prompt="Hello there", **fields):
    extra = fields.pop("extra_body", {})
    return server.openai.completions.create(
        **{"model": MODEL, "prompt": prompt, "max_tokens": 6, "seed": 1} | fields, extra_body=extra
    )


def post(server, prompt="Hello there", **fields):
    return server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 6, "seed": 1} | fields)


def encode(server, text: str) -> list[int]:
    return server.state.tokenizer.encode(text)


def test_answer(server):
    answer = ask(server, extra_body={"return_token_ids": True})
    ids = encode(server, "Hello there")
    choice = answer.choices[0]
    assert choice.prompt_token_ids == ids and choice.token_ids == reference(server, ids, 1, 6)
    assert choice.text == server.state.tokenizer.decode(choice.token_ids) and choice.finish_reason == "length"
    assert (
        answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.usage.prompt_tokens == len(ids)
    )
    assert (
        len(
            ask(server, max_tokens=openai.omit, extra_body={"return_token_ids": True, "ignore_eos": True})
            .choices[0]
            .token_ids
        )
        == 16
    )


def test_every_shape_of_prompt(server):
    ids = [encode(server, text) for text in ("One fish", "two fish, red fish")]
    for prompt, expected in [
        ("One fish", ids[:1]),
        (["One fish", "two fish, red fish"], ids),
        (ids[0], ids[:1]),
        (ids, ids),
    ]:
        answer = ask(server, prompt, n=2, extra_body={"return_token_ids": True})
        assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
        for choice in answer.choices:
            prompt_index, i = divmod(choice.index, 2)
            assert choice.prompt_token_ids == expected[prompt_index] and choice.token_ids == reference(
                server, expected[prompt_index], 1 + i, 6
            )
        assert answer.usage.prompt_tokens == sum(map(len, expected)) and answer.usage.completion_tokens == 12 * len(
            expected
        )


def test_stream_and_whole_give_the_same(server):
    prompts = ["One fish", "two fish", "é🙂", "def attend("]
    fields = {"n": 2, "max_tokens": 30, "logprobs": 1, "stop": [" w", "e"], "extra_body": {"return_token_ids": True}}
    whole = ask(server, prompts, **fields)
    merged = {
        choice.index: {"text": "", "ids": [], "tokens": [], "offsets": [], "finish": None} for choice in whole.choices
    }
    for chunk in ask(server, prompts, stream=True, **fields):
        choice = chunk.choices[0]
        mine = merged[choice.index]
        assert mine["finish"] is None
        mine["text"] += choice.text
        mine["ids"] += choice.token_ids
        mine["tokens"] += choice.logprobs.tokens
        mine["offsets"] += choice.logprobs.text_offset
        mine["finish"] = choice.finish_reason
    for choice in whole.choices:
        assert merged[choice.index] == {
            "text": choice.text,
            "ids": choice.token_ids,
            "tokens": choice.logprobs.tokens,
            "offsets": choice.logprobs.text_offset,
            "finish": choice.finish_reason,
        }


def test_shape_of_a_stream(server):
    *chunks, done = events(post(server, ["a", "b"], stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]" and len({(c["id"], c["created"], c["object"]) for c in chunks}) == 1
    usage = chunks.pop()
    assert (
        usage["choices"] == []
        and usage["usage"]["completion_tokens"] == 12
        and all(chunk["usage"] is None for chunk in chunks)
    )
    for index in (0, 1):
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert reasons[-1] == "length" and not any(reasons[:-1])


def test_template_of_a_chunk_is_the_types_encoding(server):
    from quire.server.api.openai.completions import CompletionAnswer
    from quire.server.api.openai.objects import CompletionChoice
    from quire.server.api.openai.protocol import CompletionRequest
    from quire.server.http.parse_body import parse
    from quire.server.request.delta import Delta
    from quire.server.request.generation_request import GenerationRequest

    for options in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        body, _ = parse(json.dumps({"prompt": "x", **options}).encode(), CompletionRequest)
        completion = CompletionAnswer(
            body, server.state, "cmpl-x", [GenerationRequest("x", [1], SamplingParams(), prompt_text="x")]
        )
        fast = completion.frame(Delta(3, 'quo"te \n é', [5], None, None, None, None, NO_COUNTS, None))
        assert json.loads(fast[6:]) == json.loads(completion.event([CompletionChoice(3, 'quo"te \n é')])[6:])


def test_logprobs(server):
    choice = ask(server, logprobs=2, extra_body={"return_token_ids": True}).choices[0]
    tokenizer, logprobs = server.state.tokenizer, choice.logprobs
    names = [tokenizer.id_to_token(i) for i in choice.token_ids]
    assert logprobs.tokens == names and logprobs.token_logprobs == [-0.5] * 6
    for token_id, top in zip(choice.token_ids, logprobs.top_logprobs):
        assert top == {tokenizer.id_to_token(token_id): -0.5, tokenizer.id_to_token((token_id + 1) % VOCAB_SIZE): -1.5}
    assert all(
        list(top) == [name] for name, top in zip(names, ask(server, logprobs=0).choices[0].logprobs.top_logprobs)
    )
    as_ids = ask(server, logprobs=0, extra_body={"return_tokens_as_token_ids": True}).choices[0].logprobs
    assert as_ids.tokens == [f"token_id:{i}" for i in choice.token_ids] and as_ids.text_offset == logprobs.text_offset


def test_text_offsets_point_into_the_text(server):
    prompt = "Once upon a time é🙂 there"
    choice = ask(server, prompt, echo=True, logprobs=0, max_tokens=30).choices[0]
    assert choice.text.startswith(prompt)
    spans = zip(
        choice.logprobs.tokens, choice.logprobs.text_offset, [*choice.logprobs.text_offset[1:], len(choice.text)]
    )
    whole = [
        (token, choice.text[begin:end])
        for token, begin, end in spans
        if "\\x" not in token and not token.startswith("<|")
    ]
    assert len(whole) > 20 and all(token == text for token, text in whole if "�" not in text)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(server, stream):
    prompt = "The quick brown fox. " * 8
    ids = encode(server, prompt)
    answer = post(server, prompt, echo=True, logprobs=1, max_tokens=3, stream=stream)
    if stream:
        chunks = [chunk["choices"][0] for chunk in events(answer)[:-1]]
        text = "".join(chunk["text"] for chunk in chunks)
        logprobs = {key: [item for chunk in chunks for item in chunk["logprobs"][key]] for key in chunks[0]["logprobs"]}
    else:
        text, logprobs = answer.json()["choices"][0]["text"], answer.json()["choices"][0]["logprobs"]
    assert text.startswith(prompt) and text == prompt + post(server, prompt, max_tokens=3).json()["choices"][0]["text"]
    assert len(logprobs["tokens"]) == len(ids) + 3
    assert (
        logprobs["token_logprobs"][0] is None
        and logprobs["top_logprobs"][0] is None
        and logprobs["token_logprobs"][1:] == [-0.5] * (len(ids) + 2)
    )
    assert logprobs["tokens"][: len(ids)] == [server.state.tokenizer.id_to_token(i) for i in ids]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_lm_eval_style_scoring(server, stream, ids):
    """echo + logprobs + max_tokens 0: scores the prompt without generating."""
    prompt = "What is the capital of France? Paris."
    given = encode(server, prompt) if ids else prompt
    answer = post(
        server,
        given,
        echo=True,
        logprobs=1,
        max_tokens=0,
        stream=stream,
        stream_options={"include_usage": True} if stream else None,
    )
    if stream:
        *chunks, usage = events(answer)[:-1]
        assert len(chunks) == 1
        choice, usage = chunks[0]["choices"][0], usage["usage"]
    else:
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    assert (
        choice["text"] == prompt
        and choice["finish_reason"] == "length"
        and len(choice["logprobs"]["tokens"]) == len(encode(server, prompt))
    )
    assert usage["completion_tokens"] == 0 and usage["total_tokens"] == usage["prompt_tokens"]
    bare = post(server, given, echo=True, max_tokens=0).json()["choices"][0]
    assert (bare["text"], bare["logprobs"]) == (prompt, None)


def test_prompt_logprobs(server):
    answer = post(server, ["One two three", "four"], prompt_logprobs=2).json()
    for choice, prompt in zip(answer["choices"], ("One two three", "four")):
        ids = encode(server, prompt)
        assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(ids)
        assert all(str(token_id) in entry for token_id, entry in zip(ids[1:], choice["prompt_logprobs"][1:]))


def test_special_tokens(server):
    prompt = "<|im_start|>user"
    assert post(server, prompt, echo=True, max_tokens=0).json()["choices"][0]["text"] == prompt
    ids = encode(server, prompt)
    assert post(server, ids, echo=True, max_tokens=0).json()["choices"][0]["text"] == "user"
    assert post(server, ids, echo=True, max_tokens=0, skip_special_tokens=False).json()["choices"][0]["text"] == prompt


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [[3], [-1]]}, "prompt.1.0"),
        ({"prompt": ["a"] * 200, "n": 100}, "prompt"),
        ({"prompt": "word " * 600}, "prompt"),
        ({"prompt": [5] * 512}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "n": 3, "temperature": 0}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_refused(server, fields, param):
    answer = post(server, **{"prompt": "x"} | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_accepted_combinations(server):
    for fields in (
        {"best_of": 2, "n": 2},
        {"best_of": 1},
        {"best_of": 3, "n": 2, "temperature": 0},
        {"suffix": ""},
        {"suffix": None},
        {"user": "u"},
        {"prompt": [5] * 511},
        {"stop": []},
        {"logit_bias": {}},
    ):
        assert post(server, **{"prompt": "x"} | fields).status_code == 200, fields


def test_a_streamed_echo_is_written_in_its_tenants_turn(server, monkeypatch):
    tenants = []
    original = Turns.run

    async def run(self, pool, tenant, function, num_bytes=0):
        tenants.append(tenant)
        return await original(self, pool, tenant, function, num_bytes)

    monkeypatch.setattr(Turns, "run", run)
    chunks = list(ask(server, "word " * 60, stream=True, echo=True, logprobs=5, max_tokens=2))
    assert chunks[0].choices[0].logprobs.tokens and "" not in tenants
    assert tenants, "the echo is long enough for a thread"
