"""Outputs in the real formats, by tool format."""

from __future__ import annotations

SAMPLES: dict[str, list[str]] = {
    "hermes": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "S\\u00e3o \\"Paulo\\"", "where": {"a": [1, {}]}}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ],
    "gpt_oss": [
        "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city":"Paris","days":3}<|call|>',
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is **4**.\n<|return|>",
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|>",
    ],
}
