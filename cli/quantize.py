"""Implements `quire quantize`, which writes a quantized copy of a model for quire and vLLM."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.checkpoints import hub
from quire.checkpoints.files import check_model_folder
from quire.cli.main import Parser
from quire.server.startup.bar import LinesAboveBars
from quire.server.startup.progress import StartProgress


def main(arguments: list[str]) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    logging.basicConfig(level="INFO", format="%(message)s", handlers=[LinesAboveBars()])
    try:
        _quantize(args)
    except ValueError as error:
        print(f"quire quantize: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"quire quantize: interrupted, nothing is left in {args.out}", file=sys.stderr)
        return 130
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="quire quantize",
        usage="quire quantize MODEL OUT --format {int4,int8,w8a8,fp8} [flags]",
        description="Write the weights of MODEL in fewer bits to the folder OUT, in the format of compressed-tensors.",
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder or Hub id, in safetensors")
    parser.add_argument("out", metavar="OUT", help="folder to write, which must be new or empty")
    parser.add_argument(
        "--format",
        choices=("int4", "int8", "w8a8", "fp8"),
        required=True,
        help="int4, int8: integers with a scale per group of columns; w8a8, fp8: 8-bit integers or e4m3 floats with a "
        "scale per row, whose inputs servers may round to 8 bits, too",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="text like that the model will see: its beginning calibrates GPTQ, its last quarter measures perplexity",
    )
    parser.add_argument(
        "--method",
        choices=("rtn", "gptq"),
        help="rtn: round to nearest; gptq: round such that the layers' outputs change least (default: gptq with "
        "--calibration, else rtn)",
    )
    parser.add_argument(
        "--group-size", type=int, metavar="N", help="columns per scale, -1 for whole rows (default: 128 if that fits)"
    )
    add = parser.add_argument
    add("--no-act-order", action="store_true", help="gptq: round columns from left to right, not the largest first")
    add("--num-samples", type=_positive, default=128, metavar="N", help="gptq: texts to calibrate with (default: 128)")
    add("--sequence-length", type=_positive, default=512, metavar="N", help="tokens of each text (default: 512)")
    add("--revision", metavar="REVISION", help="branch, tag or commit on the Hub")
    add("--download-dir", metavar="DIR", help="where downloads go (default: the Hub's cache)")
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def _quantize(args) -> None:
    method = args.method or ("gptq" if args.calibration else "rtn")
    if method == "gptq" and not args.calibration:
        raise ValueError("--method gptq needs --calibration FILE")
    out = _new_folder(args.out)
    bar = StartProgress(sys.stderr)
    try:
        folder = hub.resolve(args.model, revision=args.revision, download_dir=args.download_dir, progress=bar.update)
    finally:
        bar.close()
    check_model_folder(folder)
    run = importlib.import_module("quire.worker.quantize.run")  # loads torch
    settings = run.Settings(args.format, method, args.group_size, not args.no_act_order)
    texts = _texts(args, folder) if args.calibration else None
    try:
        with _emptied_on_failure(out):
            try:
                report = run.quantize_checkpoint(folder, out, settings, texts, _bar(bar))
            finally:
                bar.close()
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror or error}") from error
    _print(report, out)


def _bar(bar: StartProgress) -> Callable[[float], None] | None:
    """Draw the fraction of layers on a terminal; elsewhere the lines about each layer are enough."""
    return functools.partial(bar.update, "quantizing") if bar.stream.isatty() else None


@contextmanager
def _emptied_on_failure(out: Path) -> Iterator[None]:
    """Make the folder `out`; if the block fails or is interrupted, restore the previous state."""
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in out.iterdir():
            path.unlink()
        if made:
            out.rmdir()
        raise


def _new_folder(name: str) -> Path:
    out = Path(name)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder")
    return out


def _texts(args, folder: str):
    from quire.server.text.tokenizer import Tokenizer

    try:
        text = Path(args.calibration).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read --calibration {args.calibration}: {error}") from error
    tokenizer = Tokenizer.load(folder)
    added = tokenizer.encode("")  # BOS if the tokenizer adds one, possibly EOS
    cut = importlib.import_module("quire.worker.quantize.stages").cut
    ids = tokenizer.encode(text, add_special_tokens=False)
    return cut(ids, args.sequence_length, args.num_samples, added[0] if added else None)


def _print(report, out: Path) -> None:
    form = report.format
    groups = "one scale per row" if form.group is None else f"groups of {form.group}"
    print(
        f"{out}: {report.num_weights} weights in {form.name} ({groups}), {report.num_bytes / 1e6:,.1f} MB, "
        f"{report.bits_after:.2f} bits per weight in all (before: {report.bits_before:.2f})"
    )
    if report.unseen:
        print(f"{report.unseen} weights of experts that no calibration text reached were rounded to nearest")
    if report.perplexity:
        before, after = report.perplexity
        print(
            f"perplexity of the text's last quarter: {before:.4f} before, {after:.4f} after ({after / before - 1:+.2%})"
        )
    else:
        print("perplexity: not measured, give --calibration FILE")
