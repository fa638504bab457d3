"""The Triton kernels of worker/cuda/kernels/triton_states.py under Triton's interpreter (compiled on a GPU) against the
formula: chunks of any size, two requests, and states that are updated in place.
"""

import pytest
import torch

pytest.importorskip("triton")
from quire.worker.cuda.kernels import triton_states
from tests.helpers.worker.interpreter import needs_loops
from tests.worker.layers.test_states import RECURRENCES, state_step

pytestmark = [needs_loops] + ([pytest.mark.gpu] if torch.cuda.is_available() else [])


@pytest.fixture(autouse=True)
def device():
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    yield
    torch.set_default_device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENCES)
def test_chunks_of_any_size_equal_the_formula(name):
    torch.manual_seed(0)
    shape, inputs, formula, run = RECURRENCES[name]()
    want, pages = formula(*inputs), torch.full((6, *shape), float("nan"))
    # each step: (tokens of the first request, of the second, which is always one behind), page read and written
    start, late, read = 0, 0, [0, 0]
    for count, others in ((18, 17), (1, 2)):
        write = [2, 3] if start else [1, 3]  # from page to page, and in place
        both = [torch.cat([x[start : start + count], x[late : late + others]]) for x in inputs]
        out = run(triton_states, pages, state_step(read, write, [start, late], [count, others]), *both)
        torch.testing.assert_close(out[:count], want[start : start + count], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out[count:], want[late : late + others], atol=1e-4, rtol=1e-4)
        start, late, read = start + count, late + others, write
    assert pages[[0, 4, 5]].isnan().all(), "a page of no request was written"


def test_strong_decays_stay_finite():
    """A factor of e^-100 per token, whose inverse is no float."""
    q = torch.randn(3, 1, 8)
    g, beta, v = torch.full((3, 1, 8), -100.0), torch.ones(3, 1), torch.randn(3, 1, 12)
    out = triton_states.gated_delta_rule(q, q, v, g, beta, torch.zeros(2, 1, 8, 12), state_step([0], [1], [0], [3]))
    weight = q.square().sum(-1, keepdim=True)
    torch.testing.assert_close(out, v * weight, atol=1e-4, rtol=1e-4)
