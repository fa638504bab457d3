"""Speech recognizers that continue a chat in which embeddings of the audio replace placeholders (Qwen3-ASR). Loads no
numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quire.checkpoints.config_schema import unwrapped
from quire.checkpoints.reading import read_object
from quire.server.media.audio.languages import NAMES, code_of

if TYPE_CHECKING:
    import numpy as np

    from quire.engine.messages import MediaInfo
    from quire.server.text.tokenizer import Tokenizer

# of the published models, whose config.json may list others
_CODES = """
ar yue zh cs da nl en fil fi fr de el hi hu id it ja ko mk ms fa pl pt ro ru es sv th tr vi
"""
_SHORTEST = 8000  # samples; shorter audio is followed by silence
_PART, _PART_TOKENS = 100, 13  # frames that are encoded together, and their embeddings
_LONGEST = 30  # seconds of a piece
_MARKS = ("im_start", "im_end", "audio_start", "audio_pad", "audio_end", "endoftext")


@dataclass(frozen=True, slots=True)
class PromptedSpeechModel:
    """The model: token ids, and the tokens of the chat before and after the audio."""

    num_mels: int
    placeholder: int
    ends: tuple[int, ...]
    text_mark: int  # between the language and the text
    special: frozenset[int]
    languages: dict[str, list[int]]  # code -> tokens that say it, with the mark
    opening: list[int]  # before the prompt of the client
    middle: list[int]  # between it and the audio
    closing: list[int]  # after the audio
    tasks: dict[str, int] = field(default_factory=dict)
    step: float = 0.08  # seconds of an embedding
    max_output: int = 512  # tokens of a piece
    follows: bool = False  # whether a piece can be prompted with the previous text
    alignment_heads: tuple[tuple[int, int], ...] = ()

    @property
    def codes(self) -> list[str]:
        """Return the codes of the languages that the model knows."""
        return list(self.languages)

    def longest_prompt(self) -> list[int]:
        """Return a prompt for the longest piece, to reserve room."""
        return self.prompt(None, [], self.num_embeds(_LONGEST * 100))

    def prompt(self, language: str | None, before: Sequence[int], num_embeds: int) -> list[int]:
        """Return the tokens before the output; `before` are those of the client's prompt."""
        named = [] if language is None else self.languages[language]
        audio = [self.placeholder] * num_embeds
        return [*self.opening, *before, *self.middle, *audio, *self.closing, *named]

    def start_of_audio(self, before: Sequence[int]) -> int:
        """Return the index of the first placeholder in a prompt."""
        return len(self.opening) + len(before) + len(self.middle)

    def before(self, tokenizer: Tokenizer, prompt: str, most: int) -> list[int]:
        """Return the last tokens of a client's prompt. Raises ValueError for special tokens in it."""
        ids = tokenizer.encode(prompt.strip(), add_special_tokens=False)
        if self.special.intersection(ids):
            raise ValueError("prompt must not contain special tokens, such as <|im_end|>.")
        return ids[-most:]

    def reads(self, media: MediaInfo | None) -> bool:
        """Return whether workers read the audio as this model does."""
        return media is not None and media.audio and media.image_token_id == self.placeholder

    def features(self, samples: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the features `[mels, frames]` of a piece, and the number of its embeddings."""
        import numpy as np

        from quire.server.media.audio.features import HOP, log_mel

        samples = np.pad(samples, (0, max(0, _SHORTEST - len(samples))))
        mel = log_mel(samples, self.num_mels, len(samples) // HOP, with_rest=True)
        return mel, self.num_embeds(mel.shape[1])

    def num_embeds(self, frames: int) -> int:
        """Return the number of embeddings of `frames` frames."""
        whole, rest = divmod(frames, _PART)
        return whole * _PART_TOKENS + -(-rest // 8)


def read_prompted_model(folder: str, tokenizer: Tokenizer) -> PromptedSpeechModel:
    """Read the model. Raises ValueError for files without the tokens for transcription."""
    config = unwrapped(read_object(Path(folder, "config.json")))
    audio = config.get("audio_config") or {}
    if (half := audio.get("n_window", _PART // 2)) != _PART // 2:
        raise ValueError(f"audio_config.n_window must be {_PART // 2}, not {half!r}")

    def token(name: str) -> int:
        found = tokenizer.token_to_id(name)
        if found is None:
            raise ValueError(f"its tokenizer has no token {name}")
        return found

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    ids = {name: token(f"<|{name}|>") for name in _MARKS}
    mark = token("<asr_text>")
    placeholder = config.get("audio_token_id", ids["audio_pad"])
    codes = [code_of(name) for name in config.get("support_languages") or _CODES.split()]
    start = ids["im_start"]
    user = [ids["im_end"], *encode("\n"), start, *encode("user\n"), ids["audio_start"]]
    return PromptedSpeechModel(
        num_mels=audio.get("num_mel_bins", 128),
        placeholder=placeholder,
        ends=(ids["im_end"], ids["endoftext"]),
        text_mark=mark,
        special=frozenset((*ids.values(), mark, placeholder)),
        languages={code: [*encode(f"language {NAMES[code].title()}"), mark] for code in codes if code in NAMES},
        opening=[start, *encode("system\n")],
        middle=user,
        closing=[ids["audio_end"], ids["im_end"], *encode("\n"), start, *encode("assistant\n")],
    )
