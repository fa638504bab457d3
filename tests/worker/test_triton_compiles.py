"""Every Triton kernel compiles to machine code for GPUs that this machine does not have."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.compile_kernels", str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert compiled == {
        "_add_rms_norm_kernel",
        "_silu_and_mul_kernel",
        "_qk_norm_rope_write_kernel",
        "_tiles_kernel",
        "_choose_kernel",
        "_attend_kernel",
        "_store_kernel",
        "_exclude_kernel",
        "_attend_latent_kernel",
        "_combine_kernel",
        "_gate_up_kernel",
        "_down_kernel",
        "_sum_kernel",
        "_groups_kernel",
        "_blocks_kernel",
    }
