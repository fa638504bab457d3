"""Measures the page at `/` in Chromium while an answer of about 20,000 tokens arrives.

python benchmarks/page.py [KIND ...] [--speed 1000]

For each kind of text (tests/server/web/long_texts.py): the longest tasks of the page's main thread in milliseconds of
CPU time, which other programs on the machine change little. Then the first paint, and how long Stop takes at an endless
answer. The answer comes from inside the page, so that the server takes no time of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from tests.helpers.server.running import running_server, write_model_folder
from tests.server.web.browser import Browser
from tests.server.web.long_texts import TEXTS
from tests.server.web.using import answered, fresh, say

TOKEN = 4  # characters
ENDLESS = "words of an answer that does not end. " * 50_000
TOLD = ("longest task", "next", "tasks above 50 ms", "all")
STREAM = """
(() => {
  const reached = window.fetch, encoder = new TextEncoder();
  window.fetch = async (path, options) => {
    if (path !== 'v1/chat/completions') return reached(path, options);
    let at = 0, id = 0, started = performance.now();
    const event = choice => {
      const usage = {completion_tokens: id, prompt_tokens: 9};
      return `id: ${++id}\\ndata: ${JSON.stringify({choices: [choice], usage})}\\n\\n`;
    };
    const pull = async controller => {
      await new Promise(resolve => { setTimeout(resolve, 5); });
      if (options.signal.aborted) return null;
      const due = Math.min(speed * (performance.now() - started) / 1000, text.length / token);
      let events = '';
      for (; at < token * due; at += token) events += event({delta: {content: text.slice(at, at + token)}});
      if (at >= text.length) events += `${event({delta: {}, finish_reason: 'stop'})}data: [DONE]\\n\\n`;
      if (events) controller.enqueue(encoder.encode(events));
      if (at >= text.length) controller.close();
      else if (!events) return pull(controller);
    };
    const start = controller => options.signal.addEventListener('abort', () => {
      window.aborted = performance.now();
      controller.error(options.signal.reason);
    });
    const stream = new ReadableStream({start, pull});
    return new Response(stream, {headers: {'Content-Type': 'text/event-stream'}});
  };
})(); 0
"""
CLICK = "document.querySelector('#stop').addEventListener('pointerdown', e => { window.clicked = e.timeStamp; }); 0"

SHOWN = """
window.shown = new Promise(done => {
  const look = () => document.querySelector('#stop').hidden ? done(performance.now()) : requestAnimationFrame(look);
  look();
}); 0
"""
PLACE = "(r => [r.x + r.width / 2, r.y + r.height / 2])(document.querySelector('#stop').getBoundingClientRect())"


def stream(page: Browser, text: str, speed: int) -> None:
    page.js(f"{{ const text = {json.dumps(text)}, speed = {speed}, token = {TOKEN}; {STREAM} }}")


def tasks_of(page: Browser) -> list[float]:
    """End the trace; return the CPU milliseconds of the main thread's tasks, the longest first."""
    events = page.traced()
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    runs = [
        one for one in events if one["name"] == "RunTask" and names.get((one["pid"], one["tid"])) == "CrRendererMain"
    ]
    return sorted((one.get("tdur", 0) / 1000 for one in runs), reverse=True)


def answer(page: Browser, url: str, kind: str, speed: int) -> list[str]:
    fresh(page, url)
    stream(page, TEXTS[kind], speed)
    page.trace("toplevel", "disabled-by-default-devtools.timeline")
    say(page, "Write")
    page.wait("document.querySelectorAll('.message.assistant .figures').length === 1", timeout=300)
    tasks = tasks_of(page)
    return [f"{one:.0f} ms" for one in tasks[:2]] + [str(sum(one > 50 for one in tasks)), f"{sum(tasks) / 1000:.1f} s"]


def first_paint(page: Browser, url: str) -> str:
    page.call("Network.setCacheDisabled", cacheDisabled=True)
    page.open("about:blank")
    fresh(page, url)
    paint = page.js("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return f"first paint after {paint:.0f} ms"


def stop(page: Browser, url: str, speed: int) -> str:
    """Press Stop ten times; return the longest time until the request is ended and the page shows it."""
    worst = [0.0, 0.0]
    for _ in range(10):
        fresh(page, url)
        stream(page, ENDLESS, speed)
        page.js(CLICK)
        say(page, "Write")
        page.wait("document.querySelector('.message.assistant .text')?.innerText.length > 3000")
        x, y = page.js(PLACE)
        page.js(SHOWN)
        for kind in ("mousePressed", "mouseReleased"):
            page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        times = page.js("window.shown.then(shown => [window.aborted - window.clicked, shown - window.clicked])")
        worst = [max(pair) for pair in zip(worst, times, strict=True)]
        answered(page)
    return f"Stop ends the request after {worst[0]:.0f} ms and shows it after {worst[1]:.0f} ms, at most of ten"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="of texts; default: all")
    parser.add_argument("--speed", type=int, default=1000, help="tokens per second")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (model := Path(folder) / "model").mkdir()
        with running_server(str(write_model_folder(model))) as server:
            url = server.wait_ready().url + "/"
            (Path(folder) / "browser").mkdir()
            page = Browser(Path(folder) / "browser")
            try:
                page.size(1280, 800)
                print(first_paint(page, url), stop(page, url, arguments.speed), sep="\n", flush=True)
                print(f"| text | {' | '.join(TOLD)} |", f"|---|{'---|' * len(TOLD)}", sep="\n", flush=True)
                for kind in arguments.kinds or TEXTS:
                    print(f"| {kind} | {' | '.join(answer(page, url, kind, arguments.speed))} |", flush=True)
                    time.sleep(1)
            finally:
                page.close()


if __name__ == "__main__":
    main()
