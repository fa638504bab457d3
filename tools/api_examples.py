"""Records a request and a running server's answer for every route: `python -m tools.api_examples`.

The examples are part of the OpenAPI document (server/examples.json). Servers of the embedded model answer; classes and
infilling come from its layers with random weights. The Whisper model in WHISPER_MODEL hears the WAV file SPEECH;
without these variables its examples stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from quire.configs.sources import EMBEDDED_MODEL
from quire.server.openapi import EXAMPLES
from tools.site.endpoints import HELLO, SECTIONS, Example, lookup

TIMEOUT, START_TIMEOUT = 60.0, 600.0  # seconds
MOST_NUMBERS, MOST_ENTRIES, MOST_TEXT, MOST_LINES = 8, 2, 400, 30  # for lists, texts and streams in an answer
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the servers are on this machine
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HELLO, "max_tokens": 8}}
FRAME = "quire-example"  # for the parts of an upload
UPLOAD = (
    f'--{FRAME}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{FRAME}\r\nContent-Disposition: form-data; name="file"; filename="requests.jsonl"\r\n\r\n'
    f"{json.dumps(LINE)}\n\r\n--{FRAME}--\r\n"
).encode()
BATCH = {"input_file_id": "{file}", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
ADAPTER = {"lora_name": "later", "lora_path": "{adapters}/style"}
_FILLED = (BATCH["input_file_id"], ADAPTER["lora_path"])  # values in which a name in braces stands for a kept value
RANK = 2


def _post(path: str, body: Any, **other: Any) -> Example:
    return Example("POST", path, "", body, **other)


def _get(path: str, **other: Any) -> Example:
    return Example("GET", path, "", **other)


def _delete(path: str, **other: Any) -> Example:
    return Example("DELETE", path, "", **other)


# requests that the pages of docs/ do not make, in this order
MORE = [
    _get("/v1/streams/none-such"),
    _delete("/v1/streams/none-such"),
    _post("/v1/files", UPLOAD, keep={"file": "id"}),
    _get("/v1/files"),
    _get("/v1/files/{file}"),
    _get("/v1/files/{file}/content"),
    _post("/v1/batches", BATCH, keep={"batch": "id"}),
    _get("/v1/batches"),
    _get("/v1/batches/{batch}"),
    _post("/v1/batches/{batch}/cancel", {}),
    _delete("/v1/files/{file}"),
    _post("/v1/messages/batches/{many}/cancel", {}),
    _get("/v1/messages/batches/{many}/results"),
    _delete("/v1/messages/batches/{many}"),
    _post("/api/generate", {"model": "quire-tiny", "prompt": "Hello", "stream": False, "options": {"num_predict": 3}}),
    _post("/v1/completions/render", {"prompt": ["Hello", " you"]}),
    *(_get(path) for path in ("/get_server_info", "/health_generate", "/is_sleeping", "/kv_event_sources")),
    _post("/scale_elastic_ep", {"new_data_parallel_size": 1}),
    _post("/is_scaling_elastic_ep", None),
    _get("/tokenizer_info"),
    _post("/lora-adapters", [{"id": 0, "scale": 0.5}]),
    _post("/v1/load_lora_adapter", ADAPTER),
    _post("/v1/unload_lora_adapter", {"lora_name": "later"}),
    _post("/v1/completions", {"prompt": "The quick brown fox " * 20, "max_tokens": 1, "id_slot": 0}),
    _post("/slots/0?action=save", {"filename": "talk.bin"}),
    _post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "prompt_cache_key": "talk"}),
    _delete("/v1/cache/talk"),
    _post("/start_profile", None),
    _post("/stop_profile", None),
    _post("/api/push", {"model": "other"}),
    _post("/api/pull", {"model": "minilm", "stream": False}),
    _post("/api/create", {"model": "pirate", "from": "quire-tiny", "system": "Talk like a pirate.", "stream": False}),
    _post("/api/copy", {"source": "pirate", "destination": "captain"}),
    *(Example("DELETE", "/api/delete", "", {"model": name}) for name in ("captain", "pirate")),
]
CLASSES = [_post("/classify", {"input": "Hello!"})]
AUDIO = "/v1/audio/transcriptions", "/v1/audio/translations"
INFILL = [_post("/infill", {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "n_predict": 4})]


def main() -> None:
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="quire-examples-") as folder:
        place = Path(folder)
        (place / "adapters").mkdir()
        write_adapter(place / "adapters" / "style")
        flags = ["--pooling", "mean", "--lora-dir", str(place / "adapters"), "--allow-downloads"]
        for flag in ("--batch-dir", "--slot-save-path", "--torch-profiler-dir"):
            flags += [flag, str(place / flag.strip("-"))]
        asked = [example for examples in SECTIONS.values() for example in examples]
        last = next(i for i, one in enumerate(asked) if one.path == "/reset_prefix_cache")
        with running(str(EMBEDDED_MODEL), place, *flags, "--served-model-name", "quire-tiny") as url:
            kept = {"key": "none-such", "adapters": str(place / "adapters")}
            record(url, [*asked[:last], *MORE, *asked[last:-1]], kept, found)
        classes = variant(place / "classifier", architectures=["Qwen3ForSequenceClassification"], num_labels=2)
        with running(classes, place, "--load-format", "dummy", "--served-model-name", "classifier") as url:
            record(url, CLASSES, {}, found)
        coder = variant(place / "coder", vocab_size=1290)
        add_tokens(Path(coder), "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
        with running(coder, place, "--load-format", "dummy", "--served-model-name", "coder") as url:
            record(url, INFILL, {}, found)
        found |= heard(place)
    EXAMPLES.write_text(json.dumps(dict(sorted(found.items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{EXAMPLES}: {len(found)} routes")


def heard(place: Path) -> dict[str, dict[str, Any]]:
    """Return the examples of audio routes, recorded if the variables name a model and a file."""
    model, speech, found = os.environ.get("WHISPER_MODEL"), os.environ.get("SPEECH"), {}
    if model is None or speech is None:
        before = json.loads(EXAMPLES.read_text(encoding="utf-8"))
        return {f"POST {path}": before[f"POST {path}"] for path in AUDIO}
    head = f'--{FRAME}\r\nContent-Disposition: form-data; name="file"; filename="talk.wav"\r\n\r\n'.encode()
    form = head + Path(speech).read_bytes() + f"\r\n--{FRAME}--\r\n".encode()
    with running(model, place, "--served-model-name", "whisper") as url:
        record(url, [_post(path, form) for path in AUDIO], {}, found)
    return found


# ---- models


def variant(folder: Path, **config: Any) -> str:
    """Return a copy of the embedded model with other keys of config.json."""
    shutil.copytree(EMBEDDED_MODEL, folder)
    (folder / "model.safetensors").unlink()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False} | config))
    return str(folder)


def add_tokens(folder: Path, *tokens: str) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    used = [*content["model"]["vocab"].values(), *(one["id"] for one in content["added_tokens"])]
    for number, token in enumerate(tokens, start=max(used) + 1):
        rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": number, "content": token, "special": True} | rules)
    path.write_text(json.dumps(content), encoding="utf-8")


def write_adapter(folder: Path) -> None:
    """Write a LoRA adapter of the embedded model that changes nothing."""
    folder.mkdir()
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    name, width = "base_model.model.model.layers.0.self_attn.q_proj", config["num_attention_heads"] * config["head_dim"]
    a, b = np.zeros((RANK, config["hidden_size"]), np.float32), np.zeros((width, RANK), np.float32)
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")


# ---- servers


@contextlib.contextmanager
def running(model: str, place: Path, *flags: str) -> Iterator[str]:
    """Run a server during the block; yields its URL."""
    address, log = place / "address", place / "log"
    command = [sys.executable, "-m", "quire", "serve", model, "--port", "0", "--address-file", str(address)]
    with log.open("wb") as output:
        server = subprocess.Popen([*command, "--device", "cpu", *flags], stdout=output, stderr=output, env=os.environ)
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not address.exists() or ask(f"http://{address.read_text()}", "GET", "/ready")[0] != 200:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield f"http://{address.read_text()}"
    finally:
        server.terminate()
        server.wait(60)


def record(url: str, examples: list[Example], kept: dict[str, str], found: dict[str, dict[str, Any]]) -> None:
    """Ask the examples in order, and keep the first whole answer of each route; `kept` fills paths and bodies."""
    routes = json.loads(ask(url, "GET", "/openapi.json")[2])["paths"]
    for example in examples:
        path, body = example.path.format(**kept), example.body
        if isinstance(body, dict):
            body = {name: value.format(**kept) if value in _FILLED else value for name, value in body.items()}
        status, kind, text = asked_patiently(url, example.method, path, body)
        for name, key in example.keep.items():
            kept[name] = lookup(json.loads(text), key)
        route = f"{example.method} {route_of(path, routes)}"
        if route in found or (isinstance(body, dict) and body.get("stream", path == "/api/generate")):
            continue
        found[route] = {"status": status}
        if isinstance(body, dict | list) and body:
            found[route]["request"] = json.loads(json.dumps(body).replace(kept.get("adapters", "\0"), "adapters"))
        if text:
            answer = json.loads(text) if kind == "application/json" else text
            found[route] |= {"type": kind, "answer": shortened(answer)}


def asked_patiently(url: str, method: str, path: str, body: Any) -> tuple[int, str, str]:
    """Ask again while a batch that the example needs still runs."""
    for _ in range(100):
        answer = ask(url, method, path, body)
        if answer[0] == 200 or not path.startswith(("/v1/messages/batches/", "/v1/files/")):
            return answer
        time.sleep(0.1)
    return answer


def route_of(path: str, routes: dict[str, Any]) -> str:
    """Return the route in the document that matches a path: the one with the most literal parts."""
    parts = path.partition("?")[0].split("/")
    fitting = [
        route
        for route in routes
        if len(route.split("/")) == len(parts)
        and all(one.startswith("{") or one == part for one, part in zip(route.split("/"), parts))
    ]
    return min(fitting, key=lambda route: route.count("{"))


def ask(url: str, method: str, path: str, body: Any = None) -> tuple[int, str, str]:
    """Return (status, media type, text) of the answer; 0 if there is none."""
    if isinstance(body, bytes):
        data, kind = body, f"multipart/form-data; boundary={FRAME}"
    else:
        data, kind = None if body is None else json.dumps(body).encode(), "application/json"
    headers = {"Content-Type": kind, "X-Requested-With": "examples"}
    request = urllib.request.Request(url + path, data, headers, method=method)
    try:
        with _OPENER.open(request, timeout=TIMEOUT) as response:
            return response.status, response.headers.get_content_type(), response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get_content_type(), error.read().decode()
    except urllib.error.URLError:
        return 0, "", ""


def shortened(value: Any) -> Any:
    """Shorten the numbers, entries and lines of an answer."""
    match value:
        case str():
            lines = value.splitlines(keepends=True)
            value = "".join(lines[:MOST_LINES]) + ("..." if len(lines) > MOST_LINES else "")
            return value if len(lines) > 1 or len(value) <= MOST_TEXT else value[:MOST_TEXT] + "..."
        case list():
            return [shortened(one) for one in value[: MOST_ENTRIES if value and _is_large(value[0]) else MOST_NUMBERS]]
        case dict():
            return {name: shortened(one) for name, one in value.items()}
    return value


def _is_large(value: Any) -> bool:
    return isinstance(value, dict | list)


if __name__ == "__main__":
    main()
