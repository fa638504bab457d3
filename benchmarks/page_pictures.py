"""Makes the pictures of the page in docs/images: a conversation in light and dark colours and on a phone, and a server
with some load.

python benchmarks/page_pictures.py (needs pillow; a script answers in the conversation, so that it stays the same)
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from quire.configs.sources import EMBEDDED_MODEL
from tests.helpers.server.running import RunningServer, running_server
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import QWEN3_TOOLS
from tests.server.web.browser import Browser
from tests.server.web.using import answered, fresh, say, started

FOLDER, COLOURS = Path(__file__).parent.parent / "docs" / "images", 192
WATCHED = 60.0  # seconds
TALK = {"Name three sorts that are stable.": "Merge sort, insertion sort and bubble sort."}
ANSWER = r"""<think>
Short, with code.
</think>

Merge sort splits a list, sorts **both halves** and *merges* them, in $O(n \log n)$ steps:

```python
def merge_sort(items):
    if len(items) < 2:
        return items
    half = len(items) // 2
    return merge(merge_sort(items[:half]), merge_sort(items[half:]))
```

| sort | steps | stable |
|---|---|---|
| merge sort | `n log n` | yes |
| heap sort | `n log n` | no |
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = write_folder(folder, QWEN3_TOOLS)
        with scripted_server(model, served_model_name=["smollm2"]) as (server, script):
            (folder / "browser").mkdir()
            page = Browser(folder / "browser")
            try:
                fresh(page, server.url + "/")
                script.pause = 0.02
                for count, (question, answer) in enumerate((TALK | {"How does merge sort work?": ANSWER}).items(), 1):
                    script.says(answer)
                    say(page, question)
                    answered(page, count)
                page.wait("['.katex', '.hl-keyword'].every(one => document.querySelector(one) !== null)")
                for name, size, dark in (("chat", (1180, 720), False), ("chat-dark", (1180, 720), True)):
                    picture(page, name, size, dark)
                picture(page, "phone", (390, 780), False)
                watched(page)
            finally:
                page.close()


def watched(page: Browser) -> None:
    """Run a server of the smallest model, which answers some requests."""
    real = {"distributed_executor_backend": "uniproc", "served_model_name": ["quire-tiny"], "max_model_len": "2048"}
    with running_server(str(EMBEDDED_MODEL), **real) as server, ThreadPoolExecutor(3) as others:
        server.wait_ready(300)
        page.size(1180, 860)
        started(page, server.url + "/#watch")
        end = time.monotonic() + WATCHED
        asked = [others.submit(ask, server, number, end) for number in range(3)]
        while time.monotonic() < end:
            time.sleep(1.0)
        picture(page, "watch-dark", (1180, 860), True)
        for one in asked:
            one.result()


def ask(server: RunningServer, number: int, end: float) -> None:
    rng = random.Random(number)
    while time.monotonic() < end + 3.0:  # some are running in the picture
        words = "words of a prompt " * rng.randint(1, 40)
        messages = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": words}]
        body = {"messages": messages, "max_tokens": rng.randint(20, 200), "ignore_eos": True}
        server.http.post("/v1/chat/completions", json=body, timeout=120.0).raise_for_status()


def picture(page: Browser, name: str, size: tuple[int, int], dark: bool) -> None:
    page.size(*size)
    page.dark(dark)
    page.js("document.querySelector('#messages').scrollTop = 1e6; new Promise(done => setTimeout(done, 1000))")
    path = FOLDER / f"{name}.png"
    page.screenshot(path)
    Image.open(path).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
