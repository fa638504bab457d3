"""How many launches a step with prompts takes on a GPU besides its recorded pieces, and how much of the host's time: an
eager step of few tokens is bound by it.
"""

import pytest

from tests.helpers.gpu import has_gpu

pytest.importorskip("triton")
if has_gpu():  # what it imports selects the interpreter for all tests of this process
    pytest.skip("counts calls under Triton's interpreter", allow_module_level=True)
from tests.helpers.worker.piece_launches import host_microseconds, replayed

OUTSIDE = 20  # per step: padding, needed rows, pages of states and stages at a checkpoint
HOST = 500  # microseconds of CPU time per operation, on any machine that runs tests


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, operations, launches",
    [
        ("arcee", 4, 1),  # attention writes into the buffer that the next piece reads
        ("gemma2", 4, 1),
        ("llama4", 4, 1),
        ("gemma4-experts", 4, 1),
        ("kimi_k2", 4, 6),  # two products, absorbed queries, attention, two copies
        # a prompt with a checkpoint of its states passes two stages: an operation is a kernel or two and two copies,
        # and one more fills the buffer
        ("lfm2", 4, 4),
        ("qwen3_next", 7, 5),
        ("granite4-mamba", 6, 5),
        ("jamba", 6, 5),
    ],
)
def test_few_launches_between_pieces(name, operations, launches):
    with replayed(name) as (forward, inside):
        outside = forward.outside
    assert outside["graph"] == len(inside) == operations + 1
    assert outside.total() - outside["graph"] <= operations * launches + OUTSIDE, outside
    attention = outside["_attend_kernel"] + outside["_attend_latent_kernel"]
    if launches == 1:
        assert attention == operations and not outside["copy_"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, first, launches",
    [
        ("arcee", 1, 10),
        ("kimi_k2", 1, 14),  # latents in one launch, queries in one
        ("qwen3_next", 1, 28),  # two pieces: the inputs of the delta rule in one launch, its gated norm in one
    ],
)
def test_few_launches_inside_pieces(name, first, launches):
    """From an operation to the one of the same kind in the next layer, which a decode step's graph has, too."""
    with replayed(name) as (_, inside):
        pieces = inside[first : first + (2 if name == "qwen3_next" else 1)]
    assert 0 < sum(piece.total() for piece in pieces) <= launches, pieces


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arcee", "kimi_k2", "qwen3_next"])
def test_the_host_takes_little_between_pieces(name):
    assert host_microseconds(name) < HOST
