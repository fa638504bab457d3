"""`TokenLogprobs` of the engine in the shapes of the API."""

from __future__ import annotations

import codecs

from quire.engine.messages import TokenLogprobs
from quire.server.api.openai.objects import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from quire.server.text.tokenizer import Tokenizer

LOWEST = -9999.0  # replaces minus infinity, which JSON lacks


class Formatter:
    """Formats the log-probabilities of one choice.

    `top` is the number of requested alternatives; `as_ids` writes tokens as "token_id:N".
    """

    def __init__(self, tokenizer: Tokenizer, top: int, *, as_ids: bool = False, skip_special_tokens: bool = True):
        self.tokenizer, self.as_ids, self.skip_special_tokens = tokenizer, as_ids, skip_special_tokens
        self.limit = None if top == -1 else 1 + top  # entries of a position to look at
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = 0  # characters of text before the next token

    def token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.tokenizer.id_to_token(token_id)

    def chat(self, positions: list[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_position(position) for position in positions])

    def _chat_position(self, position: TokenLogprobs) -> ChatTokenLogprob:
        entries = [
            TopLogprob(self.token(token_id), max(logprob, LOWEST), list(self.tokenizer.token_bytes(token_id)))
            for token_id, logprob in zip(position.token_ids[: self.limit], position.logprobs)
        ]
        chosen = entries[0]
        return ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, entries[1:])

    def completion(self, positions: list[TokenLogprobs], first_token_id: int | None = None) -> CompletionLogprobs:
        """Return parallel lists. `first_token_id` is an echoed prompt's first token, which has no log-probability."""
        out = CompletionLogprobs([], [], [], [])
        if first_token_id is not None:
            self._append(out, first_token_id, None, None)
        for position in positions:
            top = {}
            for token_id, logprob in zip(position.token_ids[: self.limit], position.logprobs):
                top.setdefault(self.token(token_id), max(logprob, LOWEST))
            self._append(out, position.token_ids[0], max(position.logprobs[0], LOWEST), top)
        return out

    def _append(
        self, out: CompletionLogprobs, token_id: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        out.tokens.append(self.token(token_id))
        out.token_logprobs.append(logprob)
        out.top_logprobs.append(top)
        out.text_offset.append(self.offset)
        if not (self.skip_special_tokens and token_id in self.tokenizer.special_ids):
            self.offset += len(self.decoder.decode(self.tokenizer.token_bytes(token_id)))

    def prompt(self, positions: list[TokenLogprobs]) -> PromptLogprobs:
        return [None, *(self._prompt_position(position) for position in positions)]

    def _prompt_position(self, position: TokenLogprobs) -> dict[int, PromptLogprob]:
        """Return the entries. Alternatives are ranked by order; the actual token has the engine's rank."""
        ranked = {
            token_id: PromptLogprob(max(logprob, LOWEST), rank, self.tokenizer.id_to_token(token_id))
            for rank, (token_id, logprob) in enumerate(
                zip(position.token_ids[1 : self.limit], position.logprobs[1:]), start=1
            )
        }
        token_id = position.token_ids[0]
        return {
            token_id: PromptLogprob(
                max(position.logprobs[0], LOWEST), position.rank, self.tokenizer.id_to_token(token_id)
            )
        } | ranked
