"""Every Triton kernel compiles to machine code for GPUs that this machine does not have, without spilling registers and
within their shared memory.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from triton import knobs

FLOATS8 = {"_rounded_kernel", "_rounded_gate_up_kernel", "_rounded_down_kernel"}  # not on sm_80
PTXAS = [knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell]


def has_ptxas() -> bool:
    try:
        return all(os.access(tool.path, os.X_OK) for tool in PTXAS)
    except RuntimeError:  # raised by Triton where it finds none
        return False


pytestmark = pytest.mark.skipif(not has_ptxas(), reason="this Triton comes without ptxas")


def compile_kernels(*arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.compile_kernels", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_kernel_compiles_without_spills():
    """The first variant of each, for all GPUs in one process; `python -m tools.compile_kernels` compiles all."""
    done = compile_kernels("--first")
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {}
    for line in done.stdout.splitlines():
        target, name = line.partition(":")[0].split()
        kernels.setdefault(target, set()).add(name)
    assert kernels["sm_90"] == kernels["sm_100"] == kernels["sm_80"] | FLOATS8
    assert not kernels["sm_80"] & FLOATS8
    assert kernels["sm_80"] == {
        "_add_rms_norm_kernel",
        "_silu_and_mul_kernel",
        "_qk_norm_rope_write_kernel",
        "_tiles_kernel",
        "_choose_kernel",
        "_sample_kernel",
        "_penalize_kernel",
        "_logprobs_kernel",
        "_attend_kernel",
        "_store_kernel",
        "_conv_kernel",
        "_token_kernel",
        "_chunk_kernel",
        "_scan_kernel",
        "_exclude_kernel",
        "_attend_latent_kernel",
        "_combine_kernel",
        "_fill_kernel",
        "_write_kernel",
        "_append_kernel",
        "_route_kernel",
        "_sort_kernel",
        "_gate_up_kernel",
        "_down_kernel",
        "_sum_kernel",
        "_shrink_kernel",
        "_expand_kernel",
        "_groups_kernel",
        "_blocks_kernel",
        "_multiply_tiles_kernel",
        "_dequantize_kernel",
        "_round_kernel",
        "_fixed_kernel",
        "_rows_kernel",
        "_delta_kernel",
        "_gated_norm_kernel",
        "_write_latents_kernel",
        "_rotate_kernel",
    }


@pytest.mark.slow
def test_compiled_kernels_are_found_in_the_cache(tmp_path):
    """What is compiled without a GPU is what a launch looks for: the second time nothing is compiled."""
    arguments = "--cache", str(tmp_path), "--capability", "90", "--part", "step"
    first = compile_kernels(*arguments)
    assert first.returncode == 0 and "sm_90: " in first.stdout, first.stdout + first.stderr
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert len(files) >= 3
    again = compile_kernels(*arguments)
    assert again.stdout == first.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")} == files


LAUNCHES = """
import torch, triton, triton.language as tl
from tools import compile_kernels

@triton.jit
def _sum_of_squares(x, out, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE), tl.arange(0, 64)
    a = tl.load(x + row[:, None] * 64 + column[None, :])
    tl.store(out + row[:, None] * SIZE + row[None, :], tl.dot(a, tl.trans(a)))

def part():
    x = torch.zeros(128, 64, dtype=torch.bfloat16)
    for size in (64, 128):
        _sum_of_squares[(1,)](x, torch.zeros(size, size), SIZE=size, num_warps=256 // size)

compile_kernels.PARTS = (part,)
raise SystemExit(compile_kernels.main(["--capability", "90"]))
"""


@pytest.mark.slow
def test_a_kernel_that_takes_too_much_is_a_fault(tmp_path):
    """A tile of 64 x 64 fits, one of 128 x 128 in two warps does not."""
    file = tmp_path / "launches.py"
    file.write_text(LAUNCHES)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.getcwd()
    done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert " 0 bytes spilled" in lines[0] and len(lines) == 2
    (fault,) = [line for line in done.stderr.splitlines() if ": spills " in line]
    assert "SIZE=128" in fault
