"""LoRA adapters of the offline `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.server.errors import BadRequest
from quire.server.http import needs
from quire.server.lora.served import Chosen


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter: a name, a number that is its own, and its folder, in PEFT's format. Names and order are vLLM's."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class _Server(needs.Engine, needs.Adapters, Protocol):
    """The part of the server that loads adapters."""


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


async def chosen(state: _Server, requests: LoRARequests, num_prompts: int) -> list[list[Chosen]]:
    """Return the adapters of each prompt, loaded if new; without one those of the model's name. Raises BadRequest."""
    if requests is None or isinstance(requests, LoRARequest):
        requests = [requests] * num_prompts
    if len(requests) != num_prompts:
        raise BadRequest(f"lora_request: {len(requests)} for {num_prompts} prompts")
    loaded = {}
    for one in dict.fromkeys(requests):
        if one is not None:
            loaded[one] = await state.adapters.offline(state.client, one.lora_name, Path(one.lora_path))
    default = state.adapters.choose(None)  # those that the model's name brings
    return [default if one is None else [Chosen(loaded[one])] for one in requests]
