"""Implements `quire transcribe FILE...`, which transcribes audio files without a server."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.cli.main import Parser

if TYPE_CHECKING:
    from quire.server.offline.transcribe import TranscriptionOutput

FORMATS = ("text", "srt", "vtt", "json")
DEFAULT_MODEL = "openai/whisper-base"


def main(argv: list[str]) -> int:
    """Transcribe the files one after another; returns 1 if one cannot be read."""
    parser = Parser(
        prog="quire transcribe",
        usage="quire transcribe FILE... [flags]",
        description="Write the text of audio files. A progress bar is shown on stderr.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="WAV; with the extra `audio` also mp3, m4a, webm ...")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"a Whisper model (default: {DEFAULT_MODEL})")
    parser.add_argument("--language", metavar="CODE", help="what is spoken, such as de (default: detected)")
    parser.add_argument("--translate", action="store_true", help="write English, whatever is spoken")
    parser.add_argument("--format", choices=FORMATS, default="text", help="of the output (default: text)")
    parser.add_argument(
        "--output-dir", metavar="DIR", help="write FILE.txt, .srt, .vtt or .json there (default: standard output)"
    )
    parser.add_argument("--dtype", default="auto", help="bfloat16 or float32 (default: the model's)")
    parser.add_argument("--device", default="auto", help="cpu or cuda (default: a GPU if there is one)")
    arguments = parser.parse_args(argv)
    if missing := [name for name in arguments.files if not Path(name).is_file()]:
        parser.error(f"there is no file {missing[0]}")
    if arguments.output_dir is None and len(arguments.files) > 1 and arguments.format != "text":
        parser.error(f"--format {arguments.format} of several files needs --output-dir")
    try:
        return _transcribe(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"quire transcribe: error: {error}", file=sys.stderr)
        return 1


def _transcribe(arguments: argparse.Namespace) -> int:
    llm = importlib.import_module("quire").LLM(arguments.model, dtype=arguments.dtype, device=arguments.device)
    task, timestamps = "translate" if arguments.translate else "transcribe", arguments.format != "text"
    failed = 0
    try:
        for name in arguments.files:
            try:
                (found,) = llm.transcribe(name, task=task, language=arguments.language, timestamps=timestamps)
            except ValueError as error:
                print(f"{name}: {error}", file=sys.stderr)
                failed = 1
            else:
                _write(name, written(found, arguments.format), arguments)
    finally:
        llm.close()
    return failed


def written(found: TranscriptionOutput, kind: str) -> str:
    """Return the transcription of a file in a format."""
    subtitles = importlib.import_module("quire.server.api.openai.audio.subtitles")
    match kind:
        case "srt":
            return subtitles.srt(found.segments)
        case "vtt":
            return subtitles.vtt(found.segments)
        case "json":
            return msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n"
    return found.text + "\n"


def _write(name: str, text: str, arguments: argparse.Namespace) -> None:
    if arguments.output_dir is None:
        if len(arguments.files) > 1:
            print(f"{name}:")
        sys.stdout.write(text)
        return
    folder, ending = Path(arguments.output_dir), "txt" if arguments.format == "text" else arguments.format
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{Path(name).name}.{ending}").write_text(text, encoding="utf-8")
