"""Translates the values of other servers' flags. Each function takes the text and returns the setting's value, None
to leave the setting alone, or `NoEffect`. It raises ValueError with the reason for a refusal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_TRUE, _FALSE = ("1", "true", "yes", "on", "enabled"), ("0", "false", "no", "off", "disabled")
_CACHE_TYPES = {"f16": None, "bf16": None, "fp16": None, "": None, "f32": "float32", "q8_0": "int8"}
_LEVELS = ("error", "error", "warning", "info", "debug", "debug")
ALL_LAYERS = 99  # as a number of layers, it stands for all of them


class NoEffect(str):
    """The reason why a value has no effect."""


def unless(*words: str) -> Callable[[str], str | None]:
    """Return a function that returns the text itself, or None for `words`, which mean the default."""
    return lambda text: None if text in words else text


def number(text: str) -> float:
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text!r}") from None


def switch(text: str) -> bool:
    """Return the value of a variable that turns something on or off."""
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(f"expected true or false, got {text!r}")
    return text.lower() in _TRUE


def opposite(text: str) -> bool:
    return not switch(text)


def words(text: str) -> list[str]:
    """Return a list, separated by commas or as JSON."""
    if text.lstrip().startswith("["):
        return [str(word) for word in json.loads(text)]
    return [word.strip() for word in text.split(",") if word.strip()]


def scaled(factor: float, whole: bool = False) -> Callable[[str], Any]:
    """Return a function that converts text to a number and multiplies it by `factor`."""

    def convert(text: str) -> Any:
        result = number(text) * factor
        return round(result) if whole else result

    return convert


def ram_cache(text: str) -> float | NoEffect:
    """Convert llama.cpp's MiB of RAM for prompts to GiB."""
    size = number(text)
    if size < 0:
        raise ValueError("the RAM for KV blocks needs a limit: set --kv-offload-gib")
    return size / KIB


def gibibytes(text: str) -> str | None:
    """Convert vLLM's GiB of KV cache on CPU; 0 is its default."""
    size = number(text)
    return str(int(size * (1 << 30))) if size else None


def layers(text: str) -> str | NoEffect | None:
    """Convert llama.cpp's number of layers on the GPU: 0 is the CPU, all of them is `--device auto`."""
    if text in ("all", "auto", "-1"):
        return None
    count = number(text)
    if count == 0:
        return "cpu"
    if count >= ALL_LAYERS:
        return None
    return NoEffect("the whole model runs on one kind of device, a GPU if there is one: set --device cpu for none")


def limit(text: str) -> int | None:
    """Convert llama.cpp's limit of output tokens; a negative number is no limit."""
    count = int(number(text))
    return None if count < 0 else count


def ubatch(text: str) -> str:
    if number(text) < 32:
        raise ValueError("vLLM's number of micro-batches has no counterpart, and llama.cpp's is at least 32")
    return text


def chunk(text: str) -> str | NoEffect:
    if number(text) <= 0:
        return NoEffect("prompts are always prefilled in chunks; --max-num-batched-tokens sets their size")
    return text


def cache_type(text: str) -> str | None:
    """Convert a type of keys and values of llama.cpp or Ollama. Activations have 16 bits."""
    if text.lower() not in _CACHE_TYPES:
        raise ValueError(f"{text}: keys and values have the type of the activations, or 8 bits (q8_0, here int8)")
    return _CACHE_TYPES[text.lower()]


def level(text: str) -> str:
    """Convert llama.cpp's verbosity, a number."""
    return _LEVELS[min(max(int(number(text)), 0), len(_LEVELS) - 1)]


def debug_level(text: str) -> str | None:
    return None if text.lower() in ("", *_FALSE) else "debug"


def interval(text: str) -> str:
    """Convert seconds; a negative number means never."""
    return "0" if number(text) < 0 else text


def origins(text: str) -> list[str]:
    found = words(text)
    if "localhost" in found:
        raise ValueError("name the origins, as in --allowed-origins http://localhost:3000")
    return found


def origins_of_ollama(text: str) -> list[str] | NoEffect:
    found = words(text)
    if any("*" in origin and origin != "*" for origin in found):
        return NoEffect("origins are names, without patterns: set --allowed-origins")
    return found


def reasoning_format(text: str) -> str | None:
    if text not in ("auto", "none", "deepseek"):
        raise ValueError(f"{text}: thoughts are content (none), or fields of the answer; --reasoning-field names them")
    return "none" if text == "none" else None


def adapter(text: str) -> str:
    """Convert SGLang's adapter; its name is optional."""
    return text if "=" in text or text.startswith("{") else f"{text}={text}"


def adapters(text: str) -> list[str]:
    return [adapter(word) for word in words(text)]


def quantize(text: str) -> str | NoEffect:
    """Convert TGI's `--quantize`."""
    if text in ("int8", "int4"):
        return text
    if text in ("awq", "gptq", "marlin", "exl2", "compressed-tensors"):
        return NoEffect("the quantization of a checkpoint is read from its files")
    raise ValueError(f"{text}: 16-bit weights are rounded to int8 or int4 (--quantization)")


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text!r}")
    return value


def images(text: str) -> str:
    """Convert the limits of SGLang, which has vLLM's names."""
    return json.dumps(json_object(text))


def sampling_defaults(text: str) -> str:
    """Convert SGLang's `--sampling-defaults`: openai leaves out the model's generation_config.json."""
    if text not in ("model", "openai"):
        raise ValueError(f"expected model or openai, got {text!r}")
    return {"model": "auto", "openai": "vllm"}[text]


def policy(text: str) -> str | NoEffect:
    """Convert SGLang's order of waiting requests."""
    if text in ("fcfs", "priority"):
        return text
    return NoEffect("requests wait in the order of their arrival; equal prefixes are computed once in any order")


def above_one(text: str) -> bool:
    """Return a number of ranks, or None for one."""
    return number(text) > 1
