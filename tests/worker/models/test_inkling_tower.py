"""The sizes of Inkling's vision encoder are those that transformers plans."""

from __future__ import annotations

import pytest

from quire.worker.models.vision.inkling import scales


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 6, 24])
@pytest.mark.parametrize(("frames", "side"), [(2, 40), (2, 4), (1, 16), (4, 12), (2, 14)])
def test_scales_are_those_of_transformers(frames, side, num_layers):
    from transformers.models.inkling.modeling_inkling import plan_out_scales

    expected = [(t, h, w, c) for t, h, w, c in plan_out_scales(frames, side, num_layers, 3).tolist()]
    found = [(one.frames, one.side, one.side, one.width) for one in scales(frames, side, 3, num_layers)]
    last = found.pop()[:3], expected.pop()[:3]  # the width of the last one is the language model's
    assert found == expected and last[0] == last[1]
