"""Runs a server whose engine answers with the test's texts, token by token or in random pieces."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from quire.engine.messages import AddRequest, EngineOutput, TokenLogprobs
from tests.helpers.models.checkpoints import _byte_level
from tests.helpers.server.running import RunningServer, running_server

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


class Script:
    """Stands in for `EngineHandle.generate`. `requests` are those that were sent."""

    def __init__(self, server: RunningServer):
        self.client, self.tokenizer = server.state.client, server.state.tokenizer
        self.texts: list[str | list[int]] = []
        self.finish_reason = "stop"
        self.rng: random.Random | None = None  # cuts into pieces; None: one token at a time
        self.requests: list[AddRequest] = []
        self.pause = 0.0  # seconds before each output

    def __getattr__(self, name: str):
        return getattr(self.client, name)

    def says(self, *texts: str | list[int], finish_reason: str = "stop", seed: int | None = None) -> None:
        """Set the answers of the next requests: choice i is texts[i % len(texts)], which may be token ids."""
        self.texts, self.finish_reason = list(texts), finish_reason
        self.rng = None if seed is None else random.Random(seed)

    def generate(self, request: AddRequest) -> Stream:
        self.requests.append(request)
        ids = {
            choice.request_id: self._ids(self.texts[i % len(self.texts)]) for i, choice in enumerate(request.choices)
        }
        return Stream(list(self._outputs(ids, request)), self.pause)

    def _ids(self, text: str | list[int]) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text

    def _outputs(self, ids: dict[str, list[int]], request: AddRequest) -> Iterator[EngineOutput]:
        for request_id, all_ids in ids.items():
            if self.finish_reason == "stop":
                all_ids = [*all_ids, request.sampling.eos_token_ids[0]]
            while all_ids:
                size = 1 if self.rng is None else self.rng.randint(1, 9)
                piece, all_ids = all_ids[:size], all_ids[size:]
                logprobs = None
                if request.sampling.logprobs is not None:
                    logprobs = [TokenLogprobs([token_id], [-0.5], 1) for token_id in piece]
                reason = None if all_ids else self.finish_reason
                yield EngineOutput(request_id, piece, finish_reason=reason, logprobs=logprobs)


class Stream:
    engine = 0

    def __init__(self, outputs: list[EngineOutput], pause: float = 0.0):
        self.outputs, self.pause = outputs, pause

    async def __anext__(self) -> EngineOutput:
        if not self.outputs:
            raise StopAsyncIteration
        if self.pause:
            await asyncio.sleep(self.pause)
        return self.outputs.pop(0)

    def abort(self, request_id: str) -> None:
        self.outputs = [output for output in self.outputs if output.request_id != request_id]

    def called_tools(self, request_id: str) -> None:
        assert request_id

    async def aclose(self) -> None:
        self.outputs = []


def write_folder(folder: Path, template: str, max_length: int = 4096) -> str:
    """Write a model folder without weights, whose tokenizer has `MARKERS` as special tokens."""
    backend: tokenizers.Tokenizer = _byte_level()
    backend.add_special_tokens(MARKERS)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": template, "model_max_length": max_length})
    )
    (folder / "config.json").write_text(json.dumps({"vocab_size": backend.get_vocab_size()}))
    return str(folder)


@contextmanager
def scripted_server(folder: str, **settings) -> Iterator[tuple[RunningServer, Script]]:
    with running_server(folder, **{"max_model_len": "4096"} | settings) as server:
        server.wait_ready()
        script = server.state.client = Script(server)
        try:
            yield server, script
        finally:
            server.state.client = script.client
