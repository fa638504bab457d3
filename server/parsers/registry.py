"""The formats by name, and the choice of a format from a model's chat template and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from quire.server.parsers.harmony import HARMONY, HarmonyTools
from quire.server.parsers.reasoning.base import ReasoningFormat
from quire.server.parsers.reasoning.others import GEMMA4, GRANITE, MISTRAL
from quire.server.parsers.reasoning.think import (
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    GLM45,
    GRANITE_THINK,
    KIMI_K2,
    MINIMAX_M2,
    QWEN3,
    THINK,
)
from quire.server.parsers.recognition import HasToken
from quire.server.parsers.tools.base import ToolFormat
from quire.server.parsers.tools.deepseek_v3 import DeepseekV3, DeepseekV31
from quire.server.parsers.tools.deepseek_v32 import DeepseekV4, DeepseekV32
from quire.server.parsers.tools.gemma import FunctionGemma, Gemma3, Gemma4
from quire.server.parsers.tools.glm import Glm45
from quire.server.parsers.tools.hermes import Hermes
from quire.server.parsers.tools.json_arrays import GenericJson, Granite, Granite4, Phi4Mini
from quire.server.parsers.tools.kimi_k2 import KimiK2
from quire.server.parsers.tools.llama3 import Llama3Json
from quire.server.parsers.tools.minimax_m2 import MinimaxM2
from quire.server.parsers.tools.mistral import Mistral, MistralJson
from quire.server.parsers.tools.pythonic import Llama4Pythonic, Pythonic
from quire.server.parsers.tools.qwen3_coder import Qwen3Coder

F = TypeVar("F", ToolFormat, ReasoningFormat)

# The first format that recognizes a template is chosen: more specific formats come first.
TOOL_FORMATS: tuple[ToolFormat, ...] = (
    HarmonyTools(),
    Qwen3Coder(),
    Glm45(),
    MinimaxM2(),
    DeepseekV32(),
    DeepseekV4(),
    DeepseekV3(),
    DeepseekV31(),
    KimiK2(),
    Mistral(),
    MistralJson(),
    Gemma4(),
    FunctionGemma(),
    Granite(),
    Granite4(),
    Phi4Mini(),
    Hermes(),
    Pythonic(),
    Llama4Pythonic(),
    Llama3Json(),
    Gemma3(),
    GenericJson(),
)
REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    HARMONY,
    GEMMA4,
    MISTRAL,
    GRANITE,
    GRANITE_THINK,
    MINIMAX_M2,
    KIMI_K2,
    GLM45,
    DEEPSEEK_V3,
    DEEPSEEK_R1,
    QWEN3,
    THINK,
)

# Names of --tool-call-parser and --reasoning-parser in vLLM and SGLang. Where a name stands for several formats, the
# chat template decides, else the first is meant.
TOOL_ALIASES: Mapping[str, tuple[str, ...]] = {
    "openai": ("gpt_oss",),
    "gpt-oss": ("gpt_oss",),
    "qwen": ("hermes",),
    "qwen25": ("hermes",),
    "granite": ("granite", "granite4"),
    "qwen3_xml": ("qwen3_coder",),
    "mimo": ("qwen3_coder",),
    "step3p5": ("qwen3_coder",),
    "glm": ("glm45",),
    "glm47": ("glm45",),
    "minimax-m2": ("minimax_m2",),
    "deepseekv3": ("deepseek_v3",),
    "deepseekv31": ("deepseek_v31",),
    "deepseekv32": ("deepseek_v32",),
    "deepseekv4": ("deepseek_v4",),
    "mistral": ("mistral", "mistral_json"),
    "llama3": ("llama3_json",),
    "llama4_json": ("llama3_json",),
    "olmo3": ("pythonic",),
    "gemma": ("gemma4", "functiongemma", "gemma3"),
}
REASONING_ALIASES: Mapping[str, tuple[str, ...]] = {
    "openai_gptoss": ("gpt_oss",),
    "gpt-oss": ("gpt_oss",),
    "deepseek-r1": ("deepseek_r1",),
    "deepseek-v3": ("deepseek_v3",),
    "deepseek_v31": ("deepseek_v3",),
    "deepseek_v4": ("deepseek_v3",),
    "deepseek-v4": ("deepseek_v3",),
    "step3": ("deepseek_r1",),
    "step3p5": ("deepseek_r1",),
    "glm47": ("glm45",),
    "granite": ("granite", "granite_think"),
    "magistral": ("mistral", "think"),
    "mistral": ("mistral", "think"),
    "mimo": ("qwen3",),
    "qwen3-thinking": ("qwen3",),
    "interns1": ("qwen3",),
    "minimax": ("minimax_m2",),
    "nemotron_v3": ("think",),
    "nemotron_3": ("think",),
    "olmo3": ("think",),
    "holo2": ("think",),
}


def tool_format(name: str, template: str = "", has_token: HasToken = lambda token: False) -> ToolFormat:
    """Return the tool format with this name or alias. Raises ValueError, which lists the names."""
    return _named(TOOL_FORMATS, TOOL_ALIASES, name, "tool-call", template, has_token)


def reasoning_format(name: str, template: str = "", has_token: HasToken = lambda token: False) -> ReasoningFormat:
    """Return the reasoning format with this name or alias. Raises ValueError, which lists the names."""
    return _named(REASONING_FORMATS, REASONING_ALIASES, name, "reasoning", template, has_token)


def choose_tools(template: str | None, has_token: HasToken) -> tuple[ToolFormat | None, str]:
    """Return the format in which this model writes calls, and why; None if its template knows no tools."""
    if not template:
        return None, "the model has no chat template"
    if "tools" not in template:  # a marker alone may belong to the history or to thoughts
        return None, "the chat template does not use `tools`"
    return _chosen(TOOL_FORMATS, template, has_token, "the chat template does not use `tools`")


def choose_reasoning(template: str | None, has_token: HasToken) -> tuple[ReasoningFormat | None, str]:
    """Return the format in which this model writes its thoughts, and why; None if its template knows no thoughts."""
    if not template:
        return None, "the model has no chat template"
    return _chosen(REASONING_FORMATS, template, has_token, "the chat template has no markers of thoughts")


def _chosen(formats: Sequence[F], template: str, has_token: HasToken, otherwise: str) -> tuple[F | None, str]:
    for candidate in formats:
        why = candidate.recognize(template, has_token)
        if why is not None:
            return candidate, why
    return None, otherwise


def _named(
    formats: Sequence[F],
    aliases: Mapping[str, tuple[str, ...]],
    name: str,
    kind: str,
    template: str,
    has_token: HasToken,
) -> F:
    by_name = {candidate.name: candidate for candidate in formats}
    candidates = [by_name[known] for known in aliases.get(name, (name,)) if known in by_name]
    if not candidates:
        names = ", ".join(sorted(by_name.keys() | aliases.keys()))
        raise ValueError(f"there is no {kind} parser {name!r}; choose one of: {names}")
    recognizing = (candidate for candidate in candidates if candidate.recognize(template, has_token))
    return next(recognizing, candidates[0])
