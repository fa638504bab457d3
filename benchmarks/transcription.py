"""Transcribe files with quire and with faster-whisper in turn, one file at a time and all at once.

    python benchmarks/transcription.py MODEL CT2_MODEL PYTHON FILE...

MODEL is a Whisper model of transformers, CT2_MODEL the same one from `ct2-transformers-converter --quantization int8`,
PYTHON an interpreter that has faster-whisper. Prints seconds of work per second of audio (wall clock, and CPU time of
all processes over the number of threads, which a busy machine disturbs less), and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from benchmarks.server import cpu_seconds, family

THREADS = 2
PEER = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from faster_whisper import WhisperModel
model = WhisperModel(sys.argv[1], device="cpu", compute_type="int8", cpu_threads=int(sys.argv[2]))
def text(name):
    return "".join(one.text for one in model.transcribe(name, language="en", beam_size=1)[0])
print("ready", flush=True)
for line in sys.stdin:
    names = json.loads(line)
    with ThreadPoolExecutor(len(names)) as threads:
        print(json.dumps(list(threads.map(text, names))), flush=True)
"""
QUIRE = """
import json, sys
from quire import LLM
if __name__ == "__main__":
    settings = json.loads(sys.argv[3])
    llm = LLM(sys.argv[1], num_threads=int(sys.argv[2]), **settings)
    print("ready", flush=True)
    for line in sys.stdin:
        found = llm.transcribe(json.loads(line), language="en", use_tqdm=False)
        print(json.dumps([one.text for one in found]), flush=True)
"""


class Program:
    """A process that answers a list of files with their texts."""

    def __init__(self, python: str, source: str, *arguments: str):
        path = Path(os.environ.get("TMPDIR", "/tmp"), f"transcription-{os.getpid()}-{abs(hash(source))}.py")
        path.write_text(source)
        command = [python, str(path), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while (line := self.process.stdout.readline().strip()) != "ready":
            if not line and self.process.poll() is not None:
                raise SystemExit(f"{python} {path} ended with {self.process.returncode}")
        path.unlink()

    def ask(self, files: list[str]) -> tuple[float, float, list[str]]:
        """Return (wall seconds, CPU seconds, texts)."""
        begin, cpu = time.perf_counter(), cpu_seconds(family(self.process.pid))
        self.process.stdin.write(json.dumps(files) + "\n")
        self.process.stdin.flush()
        texts = json.loads(self.process.stdout.readline())
        return time.perf_counter() - begin, cpu_seconds(family(self.process.pid)) - cpu, texts

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)


def quieter(name: str, folder: str, factor: float) -> str:
    """Return a copy of a file that no cache has seen."""
    path = Path(folder, f"{factor:.2f}-{Path(name).name}")
    with wave.open(name) as file:
        samples = array("h", file.readframes(file.getnframes()))
        with wave.open(str(path), "wb") as out:
            out.setparams(file.getparams())
            out.writeframes(array("h", (int(one * factor) for one in samples)).tobytes())
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("ct2_model")
    parser.add_argument("python")
    parser.add_argument("files", nargs="+", help="WAV files of speech")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", default="{}", help="settings of LLM, as JSON")
    arguments = parser.parse_args()
    lengths = {}
    for name in arguments.files:
        with wave.open(name) as file:
            lengths[name] = file.getnframes() / file.getframerate()
    programs = {
        "quire": Program(sys.executable, QUIRE, arguments.model, str(THREADS), arguments.settings),
        "faster-whisper": Program(arguments.python, PEER, arguments.ct2_model, str(THREADS)),
    }
    folder = tempfile.mkdtemp()
    loads = {"one file": arguments.files[:1], "all at once": arguments.files}
    for load, files in loads.items():
        audio = sum(map(lengths.get, files))
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
        for number in range(arguments.rounds + 1):  # the first warms up
            changed = [quieter(name, folder, 1 - number / 100) for name in files]
            for name, program in programs.items():
                wall, cpu, _ = program.ask(changed)
                found[name].append((wall / audio, cpu / THREADS / audio))
        medians = {name: [statistics.median(column) for column in zip(*rows[1:])] for name, rows in found.items()}
        for name, (wall, cpu) in medians.items():
            print(f"{load:12} {name:16} RTF {wall:.3f} wall, {cpu:.3f} CPU", flush=True)
        ours, theirs = medians.values()
        print(
            f"{load:12} quire is {theirs[0] / ours[0]:.2f} x as fast by wall, {theirs[1] / ours[1]:.2f} x by CPU time"
        )
    for program in programs.values():
        program.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
