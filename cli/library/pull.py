"""Implements `quire pull`, which downloads a model before it is served."""

from __future__ import annotations

import logging
import sys

from quire.checkpoints import hub
from quire.checkpoints.library import checksums
from quire.cli.main import Parser
from quire.server.startup.progress import StartProgress


def main(argv: list[str]) -> int:
    """Run `quire pull ARGV...`; returns 1 if the model cannot be downloaded."""
    parser = Parser(
        prog="quire pull",
        description="Download a model, as `quire serve` would. Partial downloads are kept: run it again to continue. "
        "The SHA-256 of large files is checked. HF_TOKEN, HF_HOME, HF_ENDPOINT and HTTPS_PROXY work.",
    )
    parser.add_argument("model", metavar="MODEL", help="Hub id, ORG/NAME:QUANTIZATION, or a name such as llama3.2:1b")
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit on the Hub (default: main)")
    parser.add_argument("--download-dir", metavar="DIR", help="folder for downloads (default: the Hub's cache)")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
    for name in ("httpx", "httpx2"):  # a line per request; the name depends on huggingface_hub's version
        logging.getLogger(name).setLevel("WARNING")
    bar = StartProgress()
    try:
        folder = hub.resolve(
            arguments.model,
            revision=arguments.revision,
            download_dir=arguments.download_dir,
            progress=bar.update,
        )
        num_checked = checksums.check(folder, bar.update)
    except ValueError as error:
        bar.close()
        print(f"quire pull: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        bar.close()
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    bar.close()
    print(f"SHA-256 of {num_checked} file{'' if num_checked == 1 else 's'} is right", file=sys.stderr)
    print(folder)
    return 0
