"""Requests for the middle of a text."""

from __future__ import annotations

from quire.server.errors import BadRequest
from quire.server.request import needs
from quire.server.request.request import GenerationSpec
from quire.server.text.infill import Infill, infill_of


def infill_prompts(spec: GenerationSpec, state: needs.Encoding) -> tuple[list[list[int]], Infill]:
    """Return token ids of each prompt, which a middle follows. Raises BadRequest if the model or the request cannot do
    it.
    """
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
    *befores, after = state.tokenizer.encode_batch([*spec.prompts, spec.suffix], add_special_tokens=False)
    context = _context(spec, found, state)
    return [found.prompt(before, after, context) for before in befores], found


def _context(spec: GenerationSpec, found: Infill, state: needs.Text) -> list[int]:
    """Return the other files, each after the file token, or as plain text in formats without one."""
    ids: list[int] = []
    for name, text in spec.context:
        ids += [] if found.file is None else [found.file]
        ids += state.tokenizer.encode(f"{name}\n{text}\n" if name else f"{text}\n", add_special_tokens=False)
    return [*ids, found.file] if ids and found.file is not None else ids
