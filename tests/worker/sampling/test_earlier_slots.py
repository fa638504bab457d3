"""The table of earlier texts is filled by numpy and searched by Python's integers: both must find the same slot."""

import numpy as np

from quire.worker.sampling.speculation.earlier import KEY, _slot, _slots


def test_one_window_has_the_slot_that_it_has_among_all():
    tokens = np.random.default_rng(0).integers(0, (1 << 31) - 1, 500).astype(np.int32)
    windows = [tokens[i : i + KEY].tolist() for i in range(len(tokens) - KEY + 1)]
    assert [_slot(window) for window in windows] == _slots(tokens).tolist()
