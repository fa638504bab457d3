"""Time to first token of interactive requests, without and with a batch of 1,000 requests running:
`python benchmarks/batch.py [MODEL] [-- flags of quire serve]`.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import time

import httpx
import openai

from quire.cli.bench.process import ServerProcess, free_port

ENDED = ("completed", "failed", "cancelled", "expired")


def wait_until_ready(server: ServerProcess, port: int) -> None:
    """Raises RuntimeError if the server ends."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        while True:
            try:
                if client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if server.process.poll() is not None:
                raise RuntimeError(server.log_tail())
            time.sleep(0.1)


def first_token_times(client: openai.OpenAI, count: int, prompt_len: int) -> list[float]:
    """Seconds, one request after another with a pause between them; every prompt is new."""
    times = []
    for i in range(count):
        start = time.perf_counter()
        content = f"request {time.time_ns()} " + "word " * prompt_len
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}], max_tokens=16, stream=True
        )
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                times.append(time.perf_counter() - start)
                break
        stream.close()
        time.sleep(0.05 * (i % 3))
    return sorted(times)


def start_batch(client: openai.OpenAI, count: int, output_len: int) -> str:
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": f"{i} " + "word " * (20 + i % 200)}],
                "max_tokens": output_len,
                "ignore_eos": True,
            },
        }
        for i in range(count)
    ]
    content = io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())
    file = client.files.create(file=("batch.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h").id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help="a model folder, and flags of quire serve after --")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--prompt-len", type=int, default=50, help="words")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--output-len", type=int, default=200)
    arguments = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "quire", "serve", *arguments.model, "--port", str(port)]
        command += ["--batch-dir", folder, "--served-model-name", "m"]
        with ServerProcess(command, port) as server:
            wait_until_ready(server, port)
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            first_token_times(client, 5, arguments.prompt_len)
            alone = first_token_times(client, arguments.requests, arguments.prompt_len)
            batch_id = start_batch(client, arguments.batch, arguments.output_len)
            while not client.batches.retrieve(batch_id).request_counts.completed:
                time.sleep(0.1)
            beside = first_token_times(client, arguments.requests, arguments.prompt_len)
            batch = client.batches.retrieve(batch_id)
            assert batch.status not in ENDED, "the batch ended before the measurement: use a larger one"
            done = batch.request_counts.completed
            client.batches.cancel(batch_id)
    for name, times in (("alone", alone), ("beside the batch", beside)):
        median, p90 = statistics.median(times), times[int(len(times) * 0.9)]
        print(f"{name:18} median {1000 * median:6.1f} ms, p90 {1000 * p90:6.1f} ms, worst {1000 * times[-1]:6.1f} ms")
    print(f"the batch had {done} of {arguments.batch} requests done at the end")


if __name__ == "__main__":
    main()
