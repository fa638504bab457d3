"""The parsing of an answer, and its constraints."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.messages import ThinkingBudget
from quire.server.prompt.conversation import Rendered, text_of
from quire.server.prompt.drafts import Drafts
from quire.server.prompt.tool_structure import called_tools, structure_of
from quire.server.request.formats import Formats
from quire.server.request.parse import Parsing
from quire.server.request.request import Conversation, GenerationSpec
from quire.server.structured.structure import Structure


@dataclass(slots=True)
class Reading:
    """The parsing of an answer (None: as text), its constraints, and the ids that end it besides the request's."""

    parsing: Parsing | None = None
    structure: Structure | None = None
    thinking: ThinkingBudget | None = None
    visible_ids: frozenset[int] = frozenset()
    text_ends: frozenset[int] = frozenset()  # markers, and the first token that ends thoughts whose budget is used
    end_ids: tuple[int, ...] = ()


def reading_of(spec: GenerationSpec, drafts: Drafts, formats: Formats) -> Reading:
    """Return the parsing of the answers to `drafts` and the constraints on their format."""
    if drafts.infill is not None:
        return Reading(structure=spec.structure, end_ids=drafts.infill.format.ends)
    if drafts.rendered is None:
        return Reading(structure=spec.structure)
    return _read_conversation(spec.prompts, drafts.rendered, spec.structure, formats)


def _read_conversation(
    conversation: Conversation, rendered: Rendered, structure: Structure | None, formats: Formats
) -> Reading:
    """Return the reading of a chat answer; `structure` constrains its content."""
    tools = called_tools(conversation.tools, conversation.tool_choice) if formats.tools else ()
    if formats.reasoning is None and not tools:
        return Reading(structure=structure)
    opened = _opened(rendered.text, conversation, formats)
    parsing = Parsing(
        formats,
        tools,
        frozenset(tool.name for tool in conversation.tools if tool.custom),
        conversation.reasoning.separate,
        opened,
        conversation.reasoning.stream,
        rendered.template.tool_support.short_ids if tools else False,
        sum(len(message.get("tool_calls", ())) for message in conversation.messages),
    )
    if not conversation.parse or not (tools or parsing.separate):
        parsing = None
    wanted = structure_of(tools, conversation.tool_choice, structure, formats, opened, _closed(rendered.text, formats))
    thinking = _budget(rendered.thinking.budget, opened, wanted, formats)
    text_ends = formats.marker_ids | frozenset(thinking.forced[:1] if thinking else ())
    return Reading(parsing, wanted, thinking, formats.visible_ids, text_ends)


def _budget(budget: int | None, opened: bool, structure: Structure | None, formats: Formats) -> ThinkingBudget | None:
    """Return the thinking budget. The tokens that end the thoughts must not violate `structure`."""
    if budget is None or formats.reasoning is None:
        return None
    forced = formats.forced_end
    if structure is not None:
        covered = formats.tools is not None and formats.tools.covers_reasoning and structure.after is None
        forced = formats.forced_to_calls if covered else formats.forced_to_structure
    return ThinkingBudget(budget, opened, formats.begin, formats.end, forced)


def _opened(prompt: str, conversation: Conversation, formats: Formats) -> bool:
    """Return whether the answer begins within thoughts."""
    if formats.reasoning is None:
        return False
    if conversation.continue_final_message:
        begin, end = prompt.rfind(formats.reasoning.begin), prompt.rfind(formats.reasoning.end)
        return begin > end and formats.reasoning.begin in text_of(conversation.messages[-1])
    return formats.reasoning.opened(prompt)


def _closed(prompt: str, formats: Formats) -> bool:
    """Return whether the prompt ends with a closed block of thoughts, so that the model does not think."""
    return formats.reasoning is None or prompt.rstrip().endswith(formats.reasoning.end)
