"""Formats by name, and the choice from the families' chat templates."""

from __future__ import annotations

import pytest

from quire.server.parsers.registry import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
    choose_reasoning,
    choose_tools,
    reasoning_format,
    tool_format,
)
from tests.helpers.server.family_templates import FAMILY_TEMPLATES
from tests.helpers.server.templates import TEMPLATES

TOKENS = {"TOOLS_IN_SYSTEM": ["<|tool_call|>", "<|/tool_call|>"]}
CHOSEN = {  # template: tool format, reasoning format
    "CHATML": (None, None),
    "LLAMA2": (None, None),
    "LLAMA3": ("llama3_json", None),
    "MISTRAL": ("mistral_json", None),
    "QWEN25": ("hermes", None),
    "GEMMA": (None, None),
    "PHI": (None, None),
    "DEEPSEEK": (None, "deepseek_r1"),
    "QWEN3_TOOLS": ("hermes", "qwen3"),
    "DEEPSEEK_V3": ("deepseek_v3", "deepseek_r1"),
    "DEEPSEEK_V31": ("deepseek_v31", "deepseek_v3"),
    "GLM45": ("glm45", "glm45"),
    "KIMI_K2": ("kimi_k2", None),
    "XML_PARAMETERS": ("qwen3_coder", None),
    "MINIMAX_M2": ("minimax_m2", "minimax_m2"),
    "GPT_OSS": ("gpt_oss", "gpt_oss"),
    "MISTRAL_IDS": ("mistral", None),
    "GRANITE": ("granite4", "think"),
    "GEMMA_CALLS": ("functiongemma", None),
    "TOOLS_IN_SYSTEM": ("phi4_mini_json", None),
}
SHORT = {  # what tells the formats whose templates are not in the corpus
    "{% if tools %}{{ tools }}{% endif %}<|tool_call>call:{{ name }}<tool_call|><|channel>thought": (
        "gemma4",
        "gemma4",
    ),
    "{% for tool in tools %}<｜DSML｜function_calls>{% endfor %}<｜Assistant｜>{{ thinking }}</think>": (
        "deepseek_v32",
        "deepseek_v3",
    ),
    "{{ tools }}<｜DSML｜tool_calls>": ("deepseek_v4", None),
    "{{ tools }}<|start_of_role|><|tool_call|> Here is my thought process:": ("granite", "granite"),
    "{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS][ARGS][THINK]": ("mistral", "mistral"),
    "{{ tools }} as [func_name1(params_name1=params_value1)]": ("pythonic", None),
    "<start_of_turn>{{ tools }}": ("gemma3", None),
    "{{ tools }}<|tool_calls_section_begin|></think>": ("kimi_k2", "kimi_k2"),
    "{{ tools }}": ("json", None),
    "{{ messages }}": (None, None),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_template_decides(name):
    template = {**TEMPLATES, **FAMILY_TEMPLATES}[name]
    _check(template, lambda token: token in TOKENS.get(name, ()), *CHOSEN[name])


@pytest.mark.parametrize("template", SHORT)
def test_telltales(template):
    _check(template, lambda token: False, *SHORT[template])


def _check(template, has_token, tools, reasoning):
    chosen, why = choose_tools(template, has_token)
    assert (chosen and chosen.name) == tools, why
    chosen, why = choose_reasoning(template, has_token)
    assert (chosen and chosen.name) == reasoning, why
    assert why


def test_no_template():
    assert choose_tools(None, lambda token: True)[0] is None
    assert choose_reasoning("", lambda token: True)[0] is None


def test_aliases_name_formats():
    tools, thoughts = {f.name for f in TOOL_FORMATS}, {f.name for f in REASONING_FORMATS}
    assert {name for names in TOOL_ALIASES.values() for name in names} <= tools
    assert {name for names in REASONING_ALIASES.values() for name in names} <= thoughts
    for alias, names in TOOL_ALIASES.items():
        assert tool_format(alias).name == names[0]
    for alias, names in REASONING_ALIASES.items():
        assert reasoning_format(alias).name == names[0]


def test_a_name_of_several_formats_means_the_one_of_the_template():
    assert tool_format("mistral").name == "mistral"
    assert tool_format("mistral", "[TOOL_CALLS]").name == "mistral_json"
    assert tool_format("granite", FAMILY_TEMPLATES["GRANITE"]).name == "granite4"
    assert tool_format("granite", TEMPLATES["QWEN25"]).name == "granite"  # a template of another family


def test_unknown_names_are_refused_with_the_list():
    with pytest.raises(ValueError, match=r"no tool-call parser 'nope'; choose one of: .*hermes.*qwen3_coder"):
        tool_format("nope")
    with pytest.raises(ValueError, match="no reasoning parser"):
        reasoning_format("nope")


def test_call_ids():
    assert tool_format("kimi_k2").call_id("now", 3) == "functions.now:3"
    made = tool_format("mistral").call_id("now", 0)
    assert len(made) == 9 and made.isalnum()
    assert tool_format("hermes").call_id("now", 0) is None
