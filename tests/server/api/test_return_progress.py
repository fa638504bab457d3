"""`return_progress`: comments of the event stream that say how much of the prompt is computed."""

from __future__ import annotations

import json
import re
import zlib

import pytest
import tokenizers
from tokenizers import AddedToken

from tests.helpers.server.running import running_server, write_model_folder

LONG = "word " * 150


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_model_folder(tmp_path_factory.mktemp("fills"))
    backend = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    backend.add_special_tokens([AddedToken(f"<|fim_{part}|>", special=True) for part in ("prefix", "suffix", "middle")])
    backend.save(f"{folder}/tokenizer.json")
    with running_server(str(folder), fake="step_delay=0.05", max_num_batched_tokens=64) as running:
        yield running.wait_ready()


def lines(server, path: str, body: dict) -> list[str]:
    fields = {"stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    answer = server.http.post(path, json=fields | body)
    assert answer.status_code == 200, answer.text
    return [line for line in answer.text.splitlines() if line]


def told(found: list[str]) -> tuple[list[tuple[int, int]], dict]:
    """The reports, and the usage. All reports precede the first event."""
    first = next(i for i, line in enumerate(found) if line.startswith("data: "))
    reports = [re.fullmatch(r": prefill (\d+)/(\d+)", line) for line in found[:first]]
    assert not any(line.startswith(":") for line in found[first:])
    return [(int(match[1]), int(match[2])) for match in reports], json.loads(found[-2][6:])["usage"]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_reports_rise_to_the_whole_prompt(server, path, n):
    text = f"{path} {n} {LONG}"
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    reports, usage = told(lines(server, path, prompt | {"return_progress": True, "n": n}))
    total = usage["prompt_tokens"]
    assert total > 128 and {whole for _, whole in reports} == {total}
    done = [done for done, _ in reports]
    assert done == sorted(set(done)) and 1 < len(done) <= 3 and done[-1] == total
    # 3 unless two met in one turn of a busy loop; cached blocks count as computed: the first report is beyond them
    again, usage = told(lines(server, path, prompt | {"return_progress": True}))
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 64 and again[0][0] > cached and again[-1] == (total, total)


def test_several_prompts_add_up(server):
    prompts = [f"{name} {LONG}" for name in ("one", "other")]
    found = lines(server, "/v1/completions", {"prompt": prompts, "return_progress": True, "max_tokens": 1})
    total = json.loads(found[-2][6:])["usage"]["prompt_tokens"]
    done = [int(match[1]) for line in found if (match := re.fullmatch(rf": prefill (\d+)/{total}", line))]
    # comments merge while the client is slow
    assert done == sorted(set(done)) and done[-1] == total and (done[0] % 64 == 0 or done[0] == total)
    assert len(done) == sum(line.startswith(":") for line in found)


@pytest.mark.parametrize("asked", [{}, {"return_progress": False}])
def test_others_get_no_comments(server, asked):
    assert told(lines(server, "/v1/completions", {"prompt": f"plain {asked} {LONG}"} | asked))[0] == []


# path, field of the prompt, other fields
OTHERS = [
    ("/v1/responses", "input", {"max_output_tokens": 2, "store": False}),
    ("/v1/responses", "input", {"max_output_tokens": 2, "background": True}),
    ("/v1/messages", "messages", {"max_tokens": 2, "model": "alias"}),
    ("/generate", "inputs", {"parameters": {"max_new_tokens": 2}}),
    ("/generate", "text", {"sampling_params": {"max_new_tokens": 2}}),
    ("/generate_stream", "inputs", {"parameters": {"max_new_tokens": 2}}),
    ("/infill", "input_prefix", {"input_suffix": "end", "n_predict": 2}),
    ("/api/chat", "messages", {"model": "alias", "options": {"num_predict": 2}}),
    ("/api/generate", "prompt", {"model": "alias", "options": {"num_predict": 2}}),
]


def body_of(field: str, others: dict, text: str) -> dict:
    return others | {field: [{"role": "user", "content": text}] if field == "messages" else text}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "field", "others"), OTHERS)
def test_every_dialect_reports(server, path, field, others):
    body = body_of(field, others, f"{zlib.crc32(repr((path, field, others)).encode())} {LONG}") | {
        "return_progress": True
    }
    for cached in (False, True):
        answer = server.http.post(path, json=body | {"stream": True})
        assert answer.status_code == 200, answer.text
        told = reports(answer.text)
        done = [one["processed"] for one in told]
        assert done == sorted(set(done)) and done[-1] == told[-1]["total"] > 128
        assert (done[0] > 128) if cached else len(done) > 1, done
        for one in told:
            if "cache" in one:  # the whole form
                assert (one["cache"] >= 64) == cached and one["cache"] < one["processed"] and one["time_ms"] > 0
    assert not reports(server.http.post(path, json=body | {"stream": True, "return_progress": False}).text)


def reports(text: str) -> list[dict]:
    """Comments, or llama.cpp's objects in events (`data:`) and lines of JSON (Ollama's)."""
    found = []
    for line in text.splitlines():
        if match := re.fullmatch(r": prefill (\d+)/(\d+)", line):
            found.append({"processed": int(match[1]), "total": int(match[2])})
        elif '"prompt_progress"' in line:
            found.append(json.loads(line.removeprefix("data: "))["prompt_progress"])
    return found


def test_it_needs_a_stream(server):
    for path, field, others in [
        ("/v1/completions", "prompt", {}),
        ("/v1/chat/completions", "messages", {}),
        *(one for one in OTHERS if one[0] != "/generate_stream"),
    ]:
        answer = server.http.post(path, json=body_of(field, others, "x") | {"return_progress": True, "stream": False})
        assert answer.status_code == 400, path
        error = answer.json()["error"]
        if path.startswith("/api/"):
            assert "return_progress needs stream" in error
        elif path == "/v1/messages":
            assert "return_progress needs stream" in error["message"]
        else:
            assert error["param"] == "return_progress" and "stream" in error["message"]
