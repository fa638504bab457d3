"""Thoughts of every family, alone and before calls."""

from __future__ import annotations

import pytest

from quire.server.parsers.registry import REASONING_FORMATS, reasoning_format
from tests.server.parsers.answers import Call, parse

PLAIN = [candidate for candidate in REASONING_FORMATS if candidate.name != "gpt_oss"]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("reasoning", PLAIN, ids=lambda reasoning: reasoning.name)
def test_thoughts_then_content(reasoning):
    answer = parse(f"{reasoning.begin}\nLet me\n\nsee.\n{reasoning.end}\n\nFour.", None, reasoning.name)
    assert (answer.reasoning, answer.content) == ("Let me\n\nsee.", "Four.")


@pytest.mark.parametrize("reasoning", PLAIN, ids=lambda reasoning: reasoning.name)
def test_the_prompt_may_open_the_block(reasoning):
    assert reasoning.opened(f"...assistant\n{reasoning.begin}\n")
    assert not reasoning.opened(f"...assistant\n{reasoning.begin}\n\n{reasoning.end}\n\n")
    assert reasoning.opened(f"What is {reasoning.begin}?\nassistant\n") == reasoning.assumed
    for text in ("", f"{reasoning.begin}\n"):  # some models repeat the mark
        answer = parse(f"{text}Hm.\n{reasoning.end}\nFour.", None, reasoning.name, opened=True)
        assert (answer.reasoning, answer.content) == ("Hm.", "Four.")


@pytest.mark.parametrize("reasoning", PLAIN, ids=lambda reasoning: reasoning.name)
def test_cut_thoughts_are_thoughts(reasoning):
    assert parse(f"{reasoning.begin}Hm. {reasoning.end[:-1]}", None, reasoning.name).reasoning.startswith("Hm. ")
    assert parse("Hm.", None, reasoning.name, opened=True).reasoning == "Hm."


@pytest.mark.parametrize("reasoning", PLAIN, ids=lambda reasoning: reasoning.name)
def test_interleaved_blocks(reasoning):
    begin, end = reasoning.begin, reasoning.end
    answer = parse(f"{begin}One.{end}\nA\n{begin}Two.{end}B{CALL}{begin}Three.{end}C", "hermes", reasoning.name)
    assert (answer.reasoning, answer.content) == ("One.Two.Three.", "A\nBC")
    assert answer.calls == [Call("now", "{}")]


def test_calls_in_thoughts_are_thoughts():
    answer = parse(f"<think>I could write {CALL}\n</think>\n{CALL}", "hermes", "think")
    assert answer.reasoning == 'I could write \n{"name": "now", "arguments": {}}\n'
    assert len(answer.calls) == 1


def test_thoughts_in_a_call_are_arguments():
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "<think>x</think>"}}</tool_call>'
    answer = parse(text, "hermes", "think")
    assert answer.calls == [Call("get_weather", '{"city": "<think>x</think>"}')]
    assert answer.reasoning == ""


@pytest.mark.parametrize(("reasoning", "tools"), [("qwen3", "hermes"), ("kimi_k2", "kimi_k2")])
def test_a_call_may_end_thoughts_that_have_no_end(reasoning, tools):
    call = (
        CALL
        if tools == "hermes"
        else (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>"
        )
    )
    answer = parse(f"I must know.\n{call}", tools, reasoning, opened=True)
    assert answer.reasoning == "I must know."
    assert [call.name for call in answer.calls] == ["now"]
    broken = parse("I must know.\n<tool_call> is the mark.</think>Yes.", "hermes", "qwen3", opened=True)
    assert (broken.reasoning, broken.content) == ("I must know.\n is the mark.", "Yes.")


def test_marks_in_code_are_content():
    text = "Use `<think>` or\n```\n<think>\n```\nas marks."
    assert parse(text, None, "think").content == text


def test_deepseek_r1_thinks_even_where_nothing_says_so():
    assert reasoning_format("deepseek_r1").opened("<｜Assistant｜>")
    assert not reasoning_format("deepseek_v3").opened("<｜Assistant｜>")


def test_granite_marks_its_answer():
    answer = parse("<think>Hm.</think>\n<response>Four.</response>", None, "granite_think")
    assert (answer.reasoning, answer.content) == ("Hm.", "Four.")


HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{HARMONY}<|channel|>final<|message|>Four.<|return|>", "Hm.", "Four.", []),
        (f"{HARMONY}<|channel|>final<|message|>Four.", "Hm.", "Four.", []),
        (
            f"{HARMONY}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.now <|constrain|>json<|message|>{"a": "<|call|>"}<|call|>',
            "Hm.",
            "I look.",
            [Call("now", '{"a": "<|call|>"}')],
        ),
        (f"{HARMONY} to=functions.now<|channel|>commentary json<|message|><|call|>", "Hm.", "", [Call("now", "{}")]),
        (f"{HARMONY}<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "Hm.1 + 1", "", []),
        ("No channel at all, 1 < 2.", "", "No channel at all, 1 < 2.", []),
        ("<|channel|>" + "x" * 300 + "<|message|>y", "", "x" * 300 + "y", []),
    ],
)
def test_harmony(text, reasoning, content, calls):
    answer = parse(text, "gpt_oss", "gpt_oss")
    assert (answer.reasoning, answer.content, answer.calls) == (reasoning, content, calls)


@pytest.mark.slow
def test_harmony_within_thoughts_that_the_prompt_opened():
    answer = parse("Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.", None, "gpt_oss", opened=True)
    assert (answer.reasoning, answer.content) == ("Hm.", "Four.")
