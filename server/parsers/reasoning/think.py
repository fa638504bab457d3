"""The families that think between `<think>` and `</think>`. They differ in how an answer may begin and end a block."""

from __future__ import annotations

from quire.server.parsers.reasoning.base import ReasoningFormat
from quire.server.parsers.recognition import has
from quire.server.values import Json


def _think(name: str, *needles: str, forced_end: str = "\n</think>\n\n", **more: Json) -> ReasoningFormat:
    return ReasoningFormat(name, "<think>", "</think>", has("</think>", *needles), forced_end, **more)


THINK = _think("think")
# Qwen3 and Qwen3.5 may call a tool without ending the block
QWEN3 = _think("qwen3", "<|im_start|>", interrupts=("<tool_call>",))
DEEPSEEK_R1 = _think("deepseek_r1", "<｜Assistant｜>", assumed=True)
DEEPSEEK_V3 = _think("deepseek_v3", "<｜Assistant｜>", "thinking", forced_end="</think>")  # a template argument
GLM45 = _think("glm45", "[gMASK]", forced_end="</think>\n")
KIMI_K2 = _think(
    "kimi_k2",
    "<|tool_calls_section_begin|>",
    forced_end="</think>",
    interrupts=("<|tool_calls_section_begin|>",),
)
MINIMAX_M2 = _think("minimax_m2", "<minimax:tool_call>")
GRANITE_THINK = _think("granite_think", "<|start_of_role|>", "<response>", dropped=("<response>", "</response>"))
