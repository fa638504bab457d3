"""Texts and conversations -> token ids."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.errors import BadRequest
from quire.server.prompt.conversation import Rendered, render_conversation
from quire.server.request import needs
from quire.server.request.request import Conversation
from quire.server.request.sampling import too_long


def encode_conversation(conversation: Conversation, state: needs.Prompting, add_special_tokens: bool) -> list[int]:
    """Return token ids of the rendered template, of any number. Raises BadRequest naming the option at fault."""
    return encode_rendered(render_conversation(conversation, state), state, add_special_tokens)


def encode_rendered(rendered: Rendered, state: needs.Encoding, add_special_tokens: bool) -> list[int]:
    """Return token ids of a rendered template, of any number. Raises BadRequest."""
    (ids,) = encode_texts([rendered.text], state, add_special_tokens, "messages", may_truncate=True)
    return ids if rendered.illustrated is None else rendered.illustrated.expand(ids, "messages")[0]


def encode_texts(
    texts: Sequence[str], state: needs.Encoding, add_special_tokens: bool, param: str, *, may_truncate: bool = False
) -> list[list[int]]:
    """Return token ids of each text.

    A text too long for the context under any tokenization is refused before tokenizing, unless it may be truncated.
    """
    longest = state.tokenizer.max_token_chars
    for text in texts:
        if not may_truncate and len(text) > state.model.max_model_len * longest:
            raise too_long(len(text) // longest, state.model, param, at_least=True)
    try:
        return state.tokenizer.encode_batch(texts, add_special_tokens)
    except ValueError as error:
        raise BadRequest(f"{param}: {error}.", param=param) from error
