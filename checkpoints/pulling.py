"""Downloads a model in a process of its own, for a server. Its progress goes to stdout, one JSON object per line, in
the words of Ollama's /api/pull. The process may be killed: the next one continues the download.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from typing import Any

from quire.checkpoints import hub
from quire.checkpoints.library import checksums, names

INTERVAL = 0.1  # seconds between two lines about the same bytes


class _Reporter:
    """Writes the lines. Called from several threads."""

    def __init__(self) -> None:
        self.last, self.phase = 0.0, ""

    def report(self, **fields: Any) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    def on_progress(self, phase: str, fraction: float) -> None:
        """Report a new phase once; `on_bytes` reports the bytes."""
        if phase != self.phase and phase != "downloading":
            self.report(status=phase)
        self.phase = phase

    def on_bytes(self, digest: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done in (0, total) or now - self.last >= INTERVAL:
            self.last = now
            self.report(status=f"downloading {digest[7:19]}", digest=digest, total=total, completed=done)


def main(argv: list[str]) -> int:
    """Download the model or adapter. Returns 1 after a line with `error`, else 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--download-dir")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s", stream=sys.stderr)
    reporter = _Reporter()
    reporter.report(status="pulling manifest")
    try:
        if arguments.adapter:
            hub.adapter_folder(arguments.model, arguments.download_dir)
            return 0
        folder = hub.resolve(
            arguments.model,
            download_dir=arguments.download_dir,
            progress=reporter.on_progress,
            on_bytes=reporter.on_bytes,
        )
        checksums.check(folder, reporter.on_progress)
    except (ValueError, OSError) as error:
        # a client must not see paths of this machine
        reporter.report(error=str(error).removesuffix(names.not_found(arguments.model)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
