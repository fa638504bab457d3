"""Prompts that ask a model for the middle of a text (Bavarian et al., arXiv:2207.14255), in the formats of the models
that were trained for it. A format is recognised by its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.server.text.tokenizer import Tokenizer

# tokens before the prefix, before the suffix and before the middle, in the order prefix, suffix, middle
_PREFIX_FIRST = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
_SUFFIX_FIRST = (("[SUFFIX]", "[PREFIX]"),)  # Codestral: before the suffix, before the prefix, which the middle follows
# tokens that end a middle, in addition to the end of sequence
_ENDS = (
    "<|fim_pad|>",
    "<fim_pad>",
    "<|file_sep|>",
    "<file_sep>",
    "<|repo_name|>",
    "▁<EOT>",
    "<EOT>",
    "<|file_separator|>",
)
_FILE = ("<|file_sep|>", "<file_sep>")


@dataclass(frozen=True, slots=True)
class Infill:
    """`marks` are the token ids before the parts, in their order in the prompt. `file`: the token before a file of the
    context, None if the format has none.
    """

    begin: tuple[int, ...]  # prefix of every prompt
    marks: tuple[int, ...]
    suffix_first: bool
    ends: tuple[int, ...]
    file: int | None

    def prompt(self, before: Sequence[int], after: Sequence[int], context: Sequence[int] = ()) -> list[int]:
        """Return the prompt whose continuation belongs between the two texts."""
        if self.suffix_first:
            suffix, prefix = self.marks
            return [*self.begin, *context, suffix, *after, prefix, *before]
        prefix, suffix, middle = self.marks
        return [*self.begin, *context, prefix, *before, suffix, *after, middle]


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """Return the format for which the tokenizer has tokens; None if there is none."""
    for formats, suffix_first in ((_PREFIX_FIRST, False), (_SUFFIX_FIRST, True)):
        for texts in formats:
            marks = _ids(tokenizer, texts)
            if len(marks) == len(texts):
                file = _ids(tokenizer, _FILE)
                begin = tuple(tokenizer.encode(""))
                bos = tokenizer.special_tokens.get("bos_token")
                begin = begin[:1] if bos is not None and begin[:1] == (tokenizer.token_to_id(bos),) else ()
                return Infill(begin, marks, suffix_first, _ids(tokenizer, _ENDS), file[0] if file else None)
    return None


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[int, ...]:
    ids = (tokenizer.token_to_id(text) for text in texts)
    return tuple(token_id for token_id in ids if token_id is not None)
