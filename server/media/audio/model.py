"""Reads the files of Whisper: its special tokens, languages and suppressed tokens. Loads no numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.checkpoints.reading import read_object
from quire.engine.messages import SpeechRules

if TYPE_CHECKING:
    import numpy as np

    from quire.engine.messages import MediaInfo
    from quire.server.text.tokenizer import Tokenizer

STEP = 0.02  # seconds between two timestamps, and between two positions of the encoder


@dataclass(frozen=True, slots=True)
class SpeechModel:
    """A Whisper model: token ids, and sizes of the encoder."""

    num_mels: int
    positions: int  # of the encoder's output
    start: int
    end: int
    no_timestamps: int
    no_speech: int
    previous: int  # before the text that precedes the audio
    tasks: dict[str, int]  # transcribe, translate; empty for a model of English
    languages: dict[str, int]  # by code; empty for a model of English
    suppress: tuple[int, ...]
    suppress_first: tuple[int, ...]
    max_first: int
    alignment_heads: tuple[tuple[int, int], ...] = ()  # (layer, head) whose attention gives the times of words
    median_width: int = 7  # of the filter over that attention
    step: float = STEP
    follows: bool = True  # a piece can be prompted with the previous text

    @property
    def timestamp_begin(self) -> int:
        return self.no_timestamps + 1

    @property
    def codes(self) -> list[str]:
        """Return the codes of the languages that the model knows."""
        return list(self.languages) or ["en"]

    def prompt(self, language: str, task: str, timestamps: bool, before: Sequence[int] = ()) -> list[int]:
        """Return the tokens before the output; `before` are those of the text that precedes the audio."""
        start = [self.start]
        if self.languages:
            start += [self.languages[language], self.tasks[task]]
        if not timestamps:
            start.append(self.no_timestamps)
        return [*([self.previous, *before] if before else []), *start]

    def longest_prompt(self) -> list[int]:
        """Return a prompt for the longest piece, to reserve room."""
        return self.prompt(self.codes[0], "transcribe", False)

    def before(self, tokenizer: Tokenizer, prompt: str, most: int) -> list[int]:
        """Return the last tokens of a client's prompt. Raises ValueError for special tokens in it."""
        ids = tokenizer.encode(" " + prompt.strip(), add_special_tokens=False)
        if any(token >= self.end for token in ids):
            raise ValueError("prompt must not contain special tokens, such as <|endoftext|>.")
        return ids[-most:]

    def reads(self, media: MediaInfo | None) -> bool:
        """Return whether workers read the audio as this model does."""
        return media is not None and media.cross == self.positions

    def features(self, samples: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the features `[mels, frames]` of a piece, and the number of its embeddings."""
        from quire.server.media.audio.features import log_mel

        return log_mel(samples, self.num_mels, 2 * self.positions), self.positions

    def rules(self, timestamps: bool) -> SpeechRules:
        """Return the constraints on the output."""
        if not timestamps:
            return SpeechRules(self.suppress, self.suppress_first, end=self.end)
        suppress = (*self.suppress, self.no_timestamps)
        return SpeechRules(suppress, self.suppress_first, self.timestamp_begin, self.end, self.max_first)


def read_whisper(folder: str, tokenizer: Tokenizer) -> SpeechModel:
    """Read the model. Raises ValueError for files without the tokens for transcription."""
    config = read_object(Path(folder, "config.json"))
    settings = config | read_object(Path(folder, "generation_config.json"))

    def token(*names: str, default: object = None) -> int:
        found = (tokenizer.token_to_id(f"<|{name}|>") for name in names)
        value = default if isinstance(default, int) else next((one for one in found if one is not None), None)
        if value is None:
            raise ValueError(f"its tokenizer has no token <|{names[0]}|>")
        return value

    no_timestamps = token("notimestamps", default=settings.get("no_timestamps_token_id"))
    named, tasks = settings.get("lang_to_id") or {}, settings.get("task_to_id") or {}
    languages = {name.strip("<|>"): number for name, number in named.items()}
    if settings.get("is_multilingual", bool(languages)) and not languages:
        raise ValueError("its generation_config.json has no lang_to_id")
    return SpeechModel(
        num_mels=config.get("num_mel_bins", 80),
        positions=config.get("max_source_positions", 1500),
        start=token("startoftranscript", default=settings.get("decoder_start_token_id")),
        end=token("endoftext", default=settings.get("eos_token_id")),
        no_timestamps=no_timestamps,
        no_speech=token("nospeech", "nocaptions", default=no_timestamps - 1),
        previous=token("startofprev", default=settings.get("prev_sot_token_id")),
        tasks={name: number for name, number in tasks.items() if name in ("transcribe", "translate")},
        languages=languages,
        suppress=_ids(settings.get("suppress_tokens")),
        suppress_first=_ids(settings.get("begin_suppress_tokens")),
        max_first=settings.get("max_initial_timestamp_index") or -1,
        alignment_heads=_alignment_heads(settings.get("alignment_heads"), config),
        median_width=_median_width(config.get("median_filter_width", 7)),
    )


def _alignment_heads(value: object, config: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return (layer, head) pairs. Raises ValueError for heads that the model does not have."""
    sizes = [config.get(name, default) for name, default in (("decoder_layers", 4), ("decoder_attention_heads", 6))]
    heads = value or []
    if not isinstance(heads, list) or not all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(one, int) and 0 <= one < size for one, size in zip(pair, sizes))
        for pair in heads
    ):
        raise ValueError(
            f"alignment_heads in its generation_config.json must be pairs of a layer below {sizes[0]} and a head below "
            f"{sizes[1]}"
        )
    return tuple((layer, head) for layer, head in heads)


def _median_width(value: object) -> int:
    if not isinstance(value, int) or value < 1 or value % 2 == 0:
        raise ValueError(f"median_filter_width must be an odd number, not {value!r}")
    return value


def _ids(value: object) -> tuple[int, ...]:
    return tuple(one for one in value if isinstance(one, int) and one >= 0) if isinstance(value, list) else ()
