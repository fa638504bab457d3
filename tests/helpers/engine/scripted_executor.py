"""Executes steps with the answers of a script: the whole engine runs, only the tokens are given."""

from __future__ import annotations

import json
import os
from pathlib import Path

import tokenizers

from quire.configs.config import Config
from quire.worker.messages import NewRequest
from tests.helpers.engine.fake_executor import FakeExecutor, FakeOptions, _Row

BACKEND = "tests.helpers.engine.scripted_executor:ScriptedExecutor"  # of `distributed_executor_backend`
SCRIPT = "SCRIPTED_ANSWERS"  # environment variable: the path of the script


def write_script(path: Path, answers: list[tuple[list[str], str]]) -> None:
    """Write a script, which each request reads when it starts. `answers` are pairs of strings and a text: a request
    gets the text of the last pair whose strings all occur in its prompt.
    """
    path.write_text(json.dumps(answers), encoding="utf-8")


class ScriptedExecutor(FakeExecutor):
    """Samples an answer token by token, and then an end-of-sequence token."""

    def __init__(self, config: Config):
        super().__init__(config, FakeOptions(validate=False))
        self._tokenizer = tokenizers.Tokenizer.from_file(str(Path(config.model.model, "tokenizer.json")))
        self._said: dict[int, list[int]] = {}  # by the identity of the row

    def _enter(self, new: NewRequest) -> _Row:
        row = super()._enter(new)
        prompt = self._tokenizer.decode(row.token_ids[: row.num_prompt_tokens], skip_special_tokens=False)
        answers = json.loads(Path(os.environ[SCRIPT]).read_text(encoding="utf-8"))
        texts = [text for parts, text in answers if all(part in prompt for part in parts)]
        self._said[id(row)] = self._tokenizer.encode(texts[-1], add_special_tokens=False).ids if texts else []
        return row

    def _next(self, state: int, row: _Row, num_tokens: int) -> int:
        said, place = self._said[id(row)], num_tokens - row.num_prompt_tokens
        return said[place] if place < len(said) else min(row.sampling.eos_token_ids, default=0)
