"""Requests for the middle of a text."""

from __future__ import annotations

from dataclasses import dataclass

from quire.server.errors import BadRequest
from quire.server.request import needs
from quire.server.request.request import GenerationSpec
from quire.server.text.infill import Infill, infill_of


@dataclass(slots=True)
class InfillDraft:
    """The text after the prompts of a request, then other files, not yet tokenized."""

    format: Infill
    texts: list[str]

    def around(self, befores: list[list[int]], others: list[list[int]]) -> list[list[int]]:
        """Return the prompts that ask for the middle between each of `befores` and the suffix. `others` has the ids of
        `texts`; each file follows the file token, or is plain text in formats without one.
        """
        after, *files = others
        mark = [] if self.format.file is None else [self.format.file]
        context = [token for file in files for token in (*mark, *file)]
        return [self.format.prompt(before, after, [*context, *mark] if context else []) for before in befores]


def infill_draft(spec: GenerationSpec, state: needs.Encoding) -> InfillDraft:
    """Return the draft. Raises BadRequest if the model or the request cannot ask for a middle."""
    found = infill_of(state.tokenizer)
    if found is None:
        raise BadRequest(
            "suffix needs a model with tokens for filling in the middle, which this one does not have.", param="suffix"
        )
    if spec.echo or spec.options.truncate_prompt_tokens is not None:
        raise BadRequest("suffix excludes echo and truncate_prompt_tokens.", param="suffix")
    if not all(isinstance(prompt, str) for prompt in spec.prompts):
        raise BadRequest("suffix needs prompts that are texts.", param="prompt")
    limit = state.model.max_model_len * state.tokenizer.max_token_chars
    texts = [*spec.prompts, spec.suffix, *(text for file in spec.context for text in file)]
    if max(map(len, texts)) > limit:
        raise BadRequest(
            f"prompt and suffix cannot fit into the context of {state.model.max_model_len} tokens.", param="prompt"
        )
    files = [f"{name}\n{text}\n" if name else f"{text}\n" for name, text in spec.context]
    return InfillDraft(found, [spec.suffix, *files])
