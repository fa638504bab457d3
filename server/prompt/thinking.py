"""A request's settings for thinking -> variables of the model's template, and a budget in tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.server.errors import BadRequest
from quire.server.request.formats import Formats
from quire.server.request.tools import Reasoning
from quire.server.text.chat_template import ChatTemplate

# budgets, in tokens, if the template has no variable for `reasoning_effort`; above high: no limit
EFFORT_BUDGETS = {"none": 0, "minimal": 256, "low": 1024, "medium": 4096, "high": 16384}
# variables by which templates turn thinking on and off
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(slots=True)
class Thinking:
    """`budget` is the largest number of tokens, None: any."""

    variables: dict[str, Any] = field(default_factory=dict)
    budget: int | None = None


def resolve(reasoning: Reasoning, template: ChatTemplate, formats: Formats) -> Thinking:
    """Return the settings; a model that does not think meets any budget. Raises BadRequest if told to think."""
    out = Thinking(budget=reasoning.budget)
    enabled, effort = reasoning.enabled, reasoning.effort
    if effort is not None:
        if "reasoning_effort" in template.names:
            out.variables["reasoning_effort"] = effort
        elif effort != "none":
            out.budget = _smaller(out.budget, EFFORT_BUDGETS.get(effort))
        if effort == "none" and enabled is None:
            enabled = False
    if enabled is None:
        return out
    switches = [name for name in _SWITCHES if name in template.names]
    out.variables |= dict.fromkeys(switches, enabled)
    if not switches and not enabled:
        out.budget = 0
    elif not switches and formats.reasoning is None:
        param = reasoning.enabled_param
        raise BadRequest(f"{param}: this model does not think before it answers.", param=param)
    return out


def _smaller(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)
