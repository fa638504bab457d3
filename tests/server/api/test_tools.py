"""Tools and thinking of /v1/chat/completions through the openai SDK, with an engine that says what the test writes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import openai
import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from quire.configs.config import ServerConfig
from quire.server.request.formats import choose_formats
from tests.helpers.server.running import MODEL
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import CHATML, QWEN3_TOOLS

ASK = [{"role": "user", "content": "Weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CODE = {"type": "custom", "custom": {"name": "code", "description": "run it"}}
TOOLS = [WEATHER, TIME]
THOUGHTS = "<think>\nhm, é🙂\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich \\"🙂\\""}}\n</tool_call>'
CALLS = CALL + '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
ARGUMENTS = {"city": 'Zürich "🙂"'}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("tools"), QWEN3_TOOLS)) as pair:
        yield pair


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A server whose chat template knows neither tools nor thoughts."""
    with scripted_server(write_folder(tmp_path_factory.mktemp("plain"), CHATML)) as pair:
        yield pair


def ask(server, **fields):
    extra = fields.pop("extra_body", {})
    return server.openai.chat.completions.create(**{"model": MODEL, "messages": ASK} | fields, extra_body=extra)


def refused(server, **fields) -> dict:
    response = server.http.post("/v1/chat/completions", json={"messages": ASK} | fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def prompt(server, script) -> str:
    """The last request's."""
    return server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)


def joined(chunks) -> dict[int, dict]:
    """Per choice what the deltas of a stream add up to."""
    out: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            mine = out.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "finish": None})
            delta = choice.delta.model_dump()
            assert delta.get("reasoning_content") == delta.get("reasoning")
            mine["content"] += delta.get("content") or ""
            mine["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                if call["id"] is not None:
                    assert call["index"] == len(mine["calls"]) and call["function"]["arguments"] == ""
                    mine["calls"].append([call["id"], call["type"], call["function"]["name"], ""])
                else:
                    mine["calls"][call["index"]][3] += call["function"]["arguments"]
            mine["finish"] = choice.finish_reason or mine["finish"]
    return out


# ---- answers


def test_a_call(pair):
    server, script = pair
    script.says(THOUGHTS + "Let me see." + CALLS)
    answer = ask(server, tools=TOOLS)
    (choice,) = answer.choices
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, json.loads(first.function.arguments)) == ("function", "weather", ARGUMENTS)
    assert (second.function.name, second.function.arguments) == ("time", "{}")
    assert first.id != second.id and first.id.startswith("call_")
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert choice.message.reasoning_content == choice.message.reasoning == "hm, é🙂"


def test_content_is_null_beside_calls_only(pair):
    server, script = pair
    script.says(CALL)
    body = server.http.post("/v1/chat/completions", json={"messages": ASK, "tools": TOOLS}).json()
    message = body["choices"][0]["message"]
    assert message["content"] is None and set(message) == {"role", "content", "refusal", "tool_calls"}
    script.says("No.")
    body = server.http.post("/v1/chat/completions", json={"messages": ASK, "tools": TOOLS}).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "No.", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"


TEXTS = [
    THOUGHTS + "Let me see." + CALLS,
    CALL,
    THOUGHTS + "é🙂 plain",
    "no thoughts, <tool_call> in text, and `<tool_call>{}`",
    "<think>never ended 🙂",
    CALL[:40],
    '<tool_call>\n{"name": "weather", "arguments": {"city": "</tool_call> in a text"}}\n</tool_call>',
]


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_streams_in_any_pieces_equal_the_whole(pair, text, reason):
    server, script = pair
    fields = {"tools": TOOLS, "n": 2, "logprobs": True, "extra_body": {"return_token_ids": True}}
    script.says(text, "other " + text, finish_reason=reason)
    whole = ask(server, **fields)
    for seed in (None, 1, 2, 3):
        script.says(text, "other " + text, finish_reason=reason, seed=seed)
        chunks = list(ask(server, **fields, stream=True, stream_options={"include_usage": True}))
        parts = joined(chunks)
        for choice in whole.choices:
            mine, message = parts[choice.index], choice.message
            assert mine["content"] == (message.content or "")
            assert mine["reasoning"] == (getattr(message, "reasoning", None) or "")
            assert [call[2:] for call in mine["calls"]] == [
                [call.function.name, call.function.arguments] for call in message.tool_calls or ()
            ]
            assert mine["finish"] == choice.finish_reason
            told = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
            assert [i for c in told for i in c.model_extra.get("token_ids") or ()] == choice.token_ids
            logprobs = [p.model_dump() for c in told if c.logprobs for p in c.logprobs.content]
            assert logprobs == [p.model_dump() for p in choice.logprobs.content]
        assert chunks[-1].usage.model_dump() == whole.usage.model_dump()


def test_reasoning_tokens_are_counted_by_their_ids(pair):
    server, script = pair
    num_thoughts = len(server.state.tokenizer.encode("\nhm, é🙂\n", add_special_tokens=False))
    for seed in (None, 4, 5):
        script.says(THOUGHTS + "Answer", seed=seed)
        assert ask(server).usage.completion_tokens_details.reasoning_tokens == num_thoughts
    script.says("Answer")
    assert ask(server).usage.completion_tokens_details.reasoning_tokens == 0
    script.says(THOUGHTS + "Answer", THOUGHTS + "Answer")
    assert ask(server, n=2).usage.completion_tokens_details.reasoning_tokens == 2 * num_thoughts


def test_special_tokens_other_than_markers_stay_hidden(pair):
    server, script = pair
    script.says("a<|im_start|>b" + CALL)
    message = ask(server, tools=TOOLS).choices[0].message
    assert message.content == "ab" and len(message.tool_calls) == 1


def test_without_tools_a_call_is_text(pair):
    server, script = pair
    script.says(CALL)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        message = ask(server, **fields).choices[0].message
        assert not message.tool_calls and message.content == CALL, fields
    assert ("weather" in prompt(server, script)) is False
    ask(server, tools=TOOLS, tool_choice="none")
    assert "weather" in prompt(server, script)  # as in vLLM


def test_the_older_form(pair):
    server, script = pair
    script.says(CALLS)
    functions = [WEATHER["function"], TIME["function"]]
    choice = ask(server, functions=functions).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.content is None
    assert choice.message.function_call.name == "weather" and not choice.message.tool_calls
    name = arguments = ""
    for chunk in ask(server, functions=functions, stream=True):
        if call := chunk.choices[0].delta.function_call:
            name, arguments = name + (call.name or ""), arguments + call.arguments
    assert (name, json.loads(arguments)) == ("weather", ARGUMENTS)
    history = [
        *ASK,
        {"role": "assistant", "content": None, "function_call": choice.message.function_call.model_dump()},
        {"role": "function", "name": "weather", "content": "4 °C"},
    ]
    ask(server, messages=history, functions=functions)
    assert "<tool_response>\n4 °C" in prompt(server, script) and '{"city": "Zürich' in prompt(server, script)


def test_a_custom_tool(pair):
    server, script = pair
    script.says(
        '<tool_call>\n{"name": "code", "arguments": {"input": "print(\\"é\\\\n\\ud83d\\ude42\\")"}}\n</tool_call>'
    )
    call = ask(server, tools=[CODE]).choices[0].message.tool_calls[0]
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "code", 'print("é\\n🙂")')
    text = ""
    for chunk in ask(server, tools=[CODE], stream=True):
        for part in chunk.choices[0].delta.model_dump().get("tool_calls") or ():
            text += part["custom"]["input"]
    assert text == call.custom.input
    history = [*ASK, {"role": "assistant", "tool_calls": [call.model_dump(exclude_none=True)]}]
    ask(server, messages=[*history, {"role": "tool", "tool_call_id": call.id, "content": "é"}], tools=[CODE])
    assert json.dumps({"input": call.custom.input}, ensure_ascii=False) in prompt(server, script)


def test_the_history_of_a_call_renders_what_the_model_wrote(pair):
    server, script = pair
    script.says(THOUGHTS + "Let me see." + CALLS)
    message = ask(server, tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "4 °C"}]}
               for call in message.tool_calls]  # fmt: skip
    for reasoning in ("reasoning", "reasoning_content"):
        sent = message.model_dump(exclude_none=True, exclude={"reasoning", "reasoning_content"})
        ask(server, messages=[*ASK, sent | {reasoning: message.reasoning}, *results], tools=TOOLS)
        text = prompt(server, script)
        assert "Let me see.\n" + CALLS in text and "<think>\nhm, é🙂\n</think>" in text


# ---- choices and their errors


def test_what_tool_choice_asks_of_the_grammar(pair):
    server, script = pair
    script.says(CALL)
    for fields in (
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]},
            }
        },
        {"parallel_tool_calls": False},
        {"tools": [WEATHER | {"function": WEATHER["function"] | {"strict": True}}]},
    ):
        choice = ask(server, **{"tools": TOOLS} | fields).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
         "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "time"}}}, "tool_choice.custom.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [TIME] * 1025}, "tools"),
        ({"tools": TOOLS, "functions": [TIME["function"]]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"functions": [TIME["function"]], "function_call": {"name": "no"}}, "function_call.name"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning_effort"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"reasoning_format": "deepseek-legacy"}, "reasoning_format"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.1.tool_calls.0.function"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "time"}}]}]},
         "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
    ],
)  # fmt: skip
def test_refused(pair, fields, param):
    assert refused(pair[0], **fields)["param"] == param


def test_deep_schemas_are_refused(pair):
    deep: dict = {}
    for _ in range(70):
        deep = {"properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert refused(pair[0], tools=[tool])["param"] == "tools.0.function.parameters"
    tool["function"]["parameters"] = {"description": "x" * 2**20}
    assert refused(pair[0], tools=[tool])["param"] == "tools"


# ---- thinking


def test_thoughts_that_the_prompt_opens(tmp_path):
    template = QWEN3_TOOLS.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
    assert template != QWEN3_TOOLS
    with scripted_server(write_folder(tmp_path, template)) as (server, script):
        script.says("hm\n</think>\n\nSo.")
        answer = ask(server)
        message = answer.choices[0].message
        assert (message.content, message.reasoning) == ("So.", "hm")
        assert answer.usage.completion_tokens_details.reasoning_tokens == len(server.state.tokenizer.encode("hm\n"))
        ask(server, extra_body={"thinking_token_budget": 7})
        thinking = script.requests[-1].sampling.thinking
        assert (thinking.budget, thinking.opened) == (7, True)
        assert server.state.tokenizer.decode(thinking.forced, False).strip() == "</think>"


def test_reasoning_fields(pair):
    server, script = pair
    script.says(THOUGHTS + "So.")
    hidden = ask(server, extra_body={"include_reasoning": False})
    assert "reasoning" not in hidden.choices[0].message.model_extra and hidden.choices[0].message.content == "So."
    assert hidden.usage.completion_tokens_details.reasoning_tokens
    assert not any(
        part["reasoning"]
        for part in joined(ask(server, stream=True, extra_body={"reasoning": {"exclude": True}})).values()
    )
    for extra in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        assert ask(server, extra_body=extra).choices[0].message.content == THOUGHTS + "So."
    chunks = [c.choices[0].delta.model_extra.get("reasoning") for c in ask(server, stream=True)]
    assert len([part for part in chunks if part]) > 3
    whole = [c.choices[0].delta.model_extra.get("reasoning")
             for c in ask(server, stream=True, extra_body={"stream_reasoning": False})]  # fmt: skip
    assert [part for part in whole if part] == ["hm, é🙂"]


def test_how_much_to_think(pair):
    server, script = pair
    script.says("So.")

    def budget(**extra):
        ask(server, extra_body=extra)
        thinking = script.requests[-1].sampling.thinking
        return thinking and thinking.budget

    closed = "<think>\n\n</think>\n\n"
    assert budget() is None and budget(reasoning_effort="xhigh") is None and budget(thinking_token_budget=-1) is None
    assert budget(reasoning_effort="low") == 1024 and budget(reasoning={"effort": "high"}) == 16384
    assert budget(reasoning_effort="high", thinking_token_budget=5) == 5 and not prompt(server, script).endswith(closed)
    for off in (
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"reasoning": {"enabled": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert budget(**off) is None and prompt(server, script).endswith(closed)


def test_a_template_that_knows_the_effort(tmp_path):
    with scripted_server(write_folder(tmp_path, "Effort: {{ reasoning_effort }}</think>" + CHATML)) as (server, script):
        script.says("So.")
        ask(server, reasoning_effort="low")
        assert "Effort: low" in prompt(server, script) and script.requests[-1].sampling.thinking is None
        ask(server, reasoning_effort="none")  # it has no switch: no thoughts are left to it
        assert script.requests[-1].sampling.thinking.budget == 0


# ---- models that know nothing of it, and settings


@pytest.mark.slow
def test_a_template_without_tools(tmp_path):
    folder = write_folder(tmp_path, CHATML)
    history = [*ASK, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "time", "arguments": ""}}]}]
    for settings, named in (
        ({"generic_tool_prompt": False}, "--no-generic-tool-prompt"),
        ({"tool_call_parser": "hermes"}, "--tool-call-parser hermes"),
    ):
        with scripted_server(folder, **settings) as (server, _):
            error = refused(server, tools=TOOLS)
            assert error["param"] == "tools" and f"Without {named}" in error["message"]
            error = refused(server, messages=history)
            assert error["param"] == "messages" and f"Without {named}" in error["message"]


@pytest.mark.slow
def test_the_generic_prompt_of_every_template(tmp_path):
    """--generic-tool-prompt also where the template prints tools and a parser was found."""
    folder = write_folder(tmp_path, QWEN3_TOOLS)
    for parser in ("auto", "json"):
        with scripted_server(folder, generic_tool_prompt=True, tool_call_parser=parser) as (server, script):
            script.says('[{"name": "time", "arguments": {}}]')
            assert ask(server, tools=TOOLS).choices[0].message.tool_calls[0].function.name == "time"
            assert "JSON array of calls" in prompt(server, script) and "<tools>" not in prompt(server, script)


def test_a_generic_prompt_and_the_parser_of_another_format_exclude_each_other():
    server = ServerConfig(generic_tool_prompt=True, tool_call_parser="hermes")
    with pytest.raises(ValueError, match="leave out --tool-call-parser hermes"):
        choose_formats(server, SimpleNamespace(chat_templates={"default": QWEN3_TOOLS}))


def test_a_template_that_fails_on_tools_tells_why(tmp_path):
    template = "{% if tools %}{{ raise_exception('only one tool') }}{% endif %}" + CHATML
    with scripted_server(write_folder(tmp_path, template)) as (server, _):
        assert "only one tool" in refused(server, tools=TOOLS)["message"]


# like those of Granite 3.3, LFM2 and SmolLM3: results are printed, calls are not
RESULTS_ONLY = {
    "granite 3.3": "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "<|start_of_role|>{% if message.role == 'tool' %}tool_response{% else %}{{ message.role }}{% endif %}"
    "<|end_of_role|>{{ message.content }}<|end_of_text|>\n{% endfor %}<|start_of_role|>assistant<|end_of_role|>",
    "lfm2": "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{% set content = message.content %}{% if content is not string %}"
    "{% set content = content | tojson %}{% endif %}{% if message.role == 'tool' %}<|tool_response_start|>{{ content }}"
    "<|tool_response_end|>{% else %}{{ content }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    "smollm3": "{% for tool in xml_tools or [] %}{{ tool | string }}{% endfor %}{% for message in messages %}"
    "{% set content = message.content if message.content is string else '' %}{% if message.role == 'user' %}"
    "<|im_start|>user\n{{ content }}<|im_end|>\n{% elif message.role == 'assistant' %}<|im_start|>assistant\n"
    "{{ content }}<|im_end|>\n{% elif message.role == 'tool' %}<|im_start|>user\n{{ content }}<|im_end|>\n{% endif %}"
    "{% endfor %}<|im_start|>assistant\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS_ONLY)
def test_the_second_turn_where_the_template_prints_results_only(tmp_path, name):
    template = RESULTS_ONLY[name]
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}]
    history = [
        *ASK,
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "4 °C"},
    ]
    with scripted_server(write_folder(tmp_path, template)) as (server, script):
        script.says("So.")
        answer = ask(server, messages=history, extra_body={"chat_template_kwargs": {"xml_tools": TOOLS}})
        assert answer.choices[0].message.content == "So."
        expected = transformers_rendering(template, history, xml_tools=TOOLS)
        assert prompt(server, script) == expected
        if name != "smollm3":  # which takes tools under another name
            ask(server, messages=history, tools=TOOLS)
            assert prompt(server, script) == transformers_rendering(template, history, tools=TOOLS)


def transformers_rendering(template: str, messages: list, **variables) -> str:
    compiled = _compile_jinja_template(template)
    return compiled.render(messages=messages, add_generation_prompt=True, **variables)


def test_a_type_that_no_arguments_fit(pair):
    server, _ = pair
    for kind in ("string", "array", ["string", "null"]):
        for strict in (False, True):
            function = {"name": "f", "parameters": {"type": kind}, "strict": strict}
            error = refused(server, tools=[{"type": "function", "function": function}])
            assert error["param"] == "tools.0.function.parameters.type" and "'object'" in error["message"]


def test_a_model_without_tools_or_thoughts(plain):
    server, script = plain
    script.says("Hi (think)")
    answer = ask(server, reasoning_effort="low")  # it keeps to any limit
    assert answer.choices[0].message.content == "Hi (think)"
    assert refused(server, enable_thinking=True)["param"] == "enable_thinking"


def test_server_info_says_what_was_chosen(pair, plain):
    formats = pair[0].http.get("/server_info").json()["formats"]
    assert formats["tool_call_parser"]["name"] == "hermes" and "chat template" in formats["tool_call_parser"]["reason"]
    assert formats["reasoning_parser"]["name"] and formats["reasoning_parser"]["reason"]
    generic = plain[0].http.get("/server_info").json()["formats"]["tool_call_parser"]
    assert generic["name"] == "json" and "--no-generic-tool-prompt" in generic["reason"]


@pytest.mark.slow
def test_settings(tmp_path):
    folder = write_folder(tmp_path, QWEN3_TOOLS)
    settings = {"reasoning_field": "reasoning", "exclude_tools_when_tool_choice_none": True, "tool_call_parser": "none"}
    with scripted_server(folder, **settings) as (server, script):
        script.says(THOUGHTS + CALL)
        answer = ask(server, tools=TOOLS, tool_choice="none")
        assert '"city"' in answer.choices[0].message.content and "weather" not in prompt(server, script)
        assert "reasoning_content" not in answer.choices[0].message.model_extra
        assert refused(server, tools=TOOLS)["param"] == "tools"


def test_tokenize_takes_tools(pair):
    server, script = pair
    script.says("x")
    ask(server, tools=TOOLS)
    ids = server.http.post("/tokenize", json={"messages": ASK, "tools": TOOLS}).json()["tokens"]
    assert ids == script.requests[-1].prompt_token_ids


def test_stop_strings_end_calls_too(pair):
    """As in vLLM, they are looked for in the text as the model writes it."""
    server, script = pair
    script.says(CALL)
    choice = ask(server, tools=TOOLS, stop=["ürich"]).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.arguments == '{"city": "Z"}'


def test_sdk_exception(pair):
    with pytest.raises(openai.BadRequestError):
        ask(pair[0], tool_choice="required")


def test_a_generic_prompt(tmp_path):
    """For a template that knows no tools."""
    with scripted_server(write_folder(tmp_path, CHATML)) as (server, script):
        script.says('[{"name": "weather", "arguments": {"city": "Rom"}}, {"name": "time", "arguments": {}}]')
        choice = ask(server, tools=TOOLS).choices[0]
        calls = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["weather", "time"] and choice.finish_reason == "tool_calls"
        assert json.loads(calls[0].function.arguments) == {"city": "Rom"}
        assert json.dumps(WEATHER["function"]) in prompt(server, script)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "4 °C"} for call in calls]
        script.says("So.")
        answer = ask(server, messages=[*ASK, choice.message.model_dump(exclude_none=True), *results], tools=TOOLS)
        assert answer.choices[0].message.content == "So."
        text = prompt(server, script)
        assert '[{"name": "weather", "arguments": {"city": "Rom"}}, {"name": "time"' in text
        assert "<|im_start|>user\nResult: 4 °C\nResult: 4 °C<|im_end|>" in text
        formats = server.http.get("/server_info").json()["formats"]
        assert formats["tool_call_parser"]["name"] == "json"


def test_a_custom_tool_with_a_grammar(pair):
    server, script = pair
    script.says('<tool_call>\n{"name": "code", "arguments": {"input": "1+\\"2\\n3"}}\n</tool_call>')
    definition = 'start: NUMBER (OP NUMBER)*\nNUMBER: /[0-9]+/\nOP: "+" | "\\n" | "\\""'
    for syntax, text in (("lark", definition), ("regex", r"[0-9+]+")):
        form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": text}}
        tool = {"type": "custom", "custom": {"name": "code", "format": form}}
        call = ask(server, tools=[tool], tool_choice="required").choices[0].message.tool_calls[0]
        assert call.custom.input == '1+"2\n3'  # the script heeds no grammar
        assert script.requests[-1].sampling.grammar
    form["grammar"] = {"syntax": "lark", "definition": "start: /a(?=b)/"}
    assert "look-around" in refused(server, tools=[tool])["message"]


@pytest.mark.slow
def test_a_schema_that_cannot_be_enforced(pair, caplog):
    server, script = pair
    script.says(CALL)
    unenforceable = {"type": "object", "properties": {"city": {"not": {"pattern": "x"}}}}
    function = WEATHER["function"] | {"parameters": unenforceable}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = ask(server, tools=[{"type": "function", "function": function}, TIME], tool_choice=choice)
        assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    assert "tool weather: its parameters cannot be enforced" in caplog.text and "city: not: " in caplog.text
    strict = {"type": "function", "function": function | {"strict": True}}
    assert "city: not: " in refused(server, tools=[strict], tool_choice="required")["message"]
