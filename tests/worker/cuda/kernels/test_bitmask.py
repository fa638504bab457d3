"""Masks of allowed tokens: plain torch, the native CPU kernel and the Triton kernel against a loop."""

from __future__ import annotations

import pytest
import torch

from quire.worker.cpu import ops as native
from quire.worker.platforms.ops import Ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(exclude, vocab_size: int, device: str = "cpu") -> None:
    draw = torch.Generator().manual_seed(vocab_size)
    storage = torch.randn(5, vocab_size + 7, generator=draw)
    logits = storage[:, :vocab_size]  # rows with a stride of their own
    rows, words = [4, 0, 2], -(-vocab_size // 32)
    masks = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int64, generator=draw).to(torch.int32)
    masks[0, : words // 2], masks[1, words // 3 :] = -1, 0
    expected = logits.clone()
    for k, row in enumerate(rows):
        for token in range(vocab_size):
            if not masks[k, token // 32].item() >> (token % 32) & 1:
                expected[row, token] = float("-inf")
    moved = storage.to(device)
    exclude(moved[:, :vocab_size], torch.tensor(rows, device=device), masks.to(device))
    assert torch.equal(moved[:, :vocab_size].cpu(), expected)
    assert torch.equal(moved[:, vocab_size:].cpu(), storage[:, vocab_size:])


@pytest.mark.parametrize("vocab_size", [32, 100, 1000])
def test_torch(vocab_size):
    check(Ops().exclude_by_bitmask, vocab_size)


@pytest.mark.parametrize("vocab_size", [32, 100, 40_000])
@pytest.mark.usefixtures("native_kernels")
def test_native(vocab_size):
    check(native.exclude_by_bitmask, vocab_size)


@pytest.mark.parametrize("vocab_size", [100, 5000])
def test_triton(vocab_size):
    pytest.importorskip("triton")
    from quire.worker.cuda.kernels import triton_logits

    check(triton_logits.exclude_by_bitmask, vocab_size, DEVICE)
