"""Writes calls in each format, as the families' chat templates write them: independent of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    """Between tags: strings as they are, other values as JSON."""
    return value if isinstance(value, str) else _json(value)


def _object(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return f'{{"name": {_json(name)}, "{key}": {_json(arguments)}}}'


def _gemma(value: Any, quote: str) -> str:
    match value:
        case str():
            return quote + value + quote
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(item, quote)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(_gemma(item, quote) for item in value) + "]"
    return _json(value)


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls)


def harmony(calls: Calls) -> str:
    ((name, arguments),) = calls
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"


def qwen3_coder(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        values = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
        texts.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join(texts)


def glm45(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in arguments.items()
        )
        texts.append(f"<tool_call>{name}\n{values}</tool_call>")
    return "\n".join(texts)


def minimax_m2(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        values = "".join(f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in arguments.items())
        texts.append(f'<invoke name="{name}">\n{values}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


def dsml(section: str) -> Callable[[Calls], str]:
    def render(calls: Calls) -> str:
        texts = []
        for name, arguments in calls:
            values = "".join(
                f'<｜DSML｜parameter name="{key}" string="{_json(isinstance(value, str))}">{_plain(value)}'
                "</｜DSML｜parameter>\n"
                for key, value in arguments.items()
            )
            texts.append(f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n')
        return f"<｜DSML｜{section}>\n{''.join(texts)}</｜DSML｜{section}>"

    return render


def deepseek_v3(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def kimi_k2(calls: Calls) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(texts) + "<|tool_calls_section_end|>"


def mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _array(calls: Calls) -> str:
    return "[" + ", ".join(_object(*call) for call in calls) + "]"


def gemma(begin: str, end: str, quote: str) -> Callable[[Calls], str]:
    def render(calls: Calls) -> str:
        return "".join(f"{begin}call:{name}{_gemma(arguments, quote)}{end}" for name, arguments in calls)

    return render


def pythonic(calls: Calls) -> str:
    texts = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    ]
    return f"[{', '.join(texts)}]"


RENDERERS: dict[str, Callable[[Calls], str]] = {
    "hermes": hermes,
    "gpt_oss": harmony,
    "qwen3_coder": qwen3_coder,
    "glm45": glm45,
    "minimax_m2": minimax_m2,
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "kimi_k2": kimi_k2,
    "mistral": mistral,
    "mistral_json": lambda calls: "[TOOL_CALLS] " + _array(calls),
    "llama3_json": lambda calls: "; ".join(_object(*call, key="parameters") for call in calls),
    "granite": lambda calls: "<|tool_call|>" + _array(calls),
    "granite4": hermes,
    "phi4_mini_json": lambda calls: "<|tool_call|>" + _array(calls) + "<|/tool_call|>",
    "json": _array,
    "pythonic": pythonic,
    "llama4_pythonic": pythonic,
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma3": pythonic,
}
