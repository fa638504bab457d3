"""benchmarks/cpu_peers.py: the best of the rounds counts, an engine that cannot load a model is left out of its row."""

from __future__ import annotations

import sys

from benchmarks.cpu_peers import Load, Speed, header, measure, row, run_llama_bench, run_openvino

LOAD = Load("m.gguf", 1, 512, 32)


def test_table(capsys):
    speeds = iter([Speed(10, 200), Speed(12, 180)])
    tries = []

    def broken(load):
        tries.append(load)
        raise RuntimeError("unknown model architecture")

    engines = {"quire": lambda load: next(speeds), "a": lambda load: Speed(8, 400), "b": broken}
    found = measure(engines, LOAD, 2)
    assert found == {"quire": (12, 200), "a": (8, 400), "b": None} and len(tries) == 1
    assert "b: m.gguf: unknown model architecture" in capsys.readouterr().err
    lines = header(list(engines)).splitlines()
    assert lines[0] == "| model | 1 stream: quire | a | b | ratio | prompt: quire | a | b | ratio |"
    assert row("m", found) == "| m | 12.0 | 8.0 | - | **1.50** | 200.0 | 400.0 | - | **0.50** |"
    assert lines[1].count("|") == lines[0].count("|") == row("m", found).count("|")


def test_what_engines_print(tmp_path):
    bench = tmp_path / "llama-bench"
    bench.write_text(
        f"#!{sys.executable}\nimport sys\nassert sys.argv[1:] == '-m m.gguf -t 1 -p 512 -n 32 -r 2 -o json'.split()\n"
        'print(\'[{"n_gen": 0, "avg_ts": 300.5}, {"n_gen": 32, "avg_ts": 40.25}]\')\n'
    )
    bench.chmod(0o755)
    assert run_llama_bench(str(bench), LOAD) == (40.25, 300.5)
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nprint('loading')\nprint('[20.5, 100.0]')\n")
    python.chmod(0o755)
    assert run_openvino(str(python), LOAD) == (20.5, 100.0)
    bench.write_text("#!/bin/sh\necho why >&2\nexit 3\n")
    assert measure({"a": lambda load: run_llama_bench(str(bench), load)}, LOAD, 1) == {"a": None}
