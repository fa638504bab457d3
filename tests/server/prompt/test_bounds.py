"""The number of prompts of a request is bounded, whatever they are prompts of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.server.errors import BadRequest
from quire.server.prompt.drafts import rendered
from quire.server.request.limits import MAX_PROMPTS


@pytest.mark.parametrize("suffix", [None, "the end"])
def test_too_many_prompts_are_refused(suffix):
    spec = SimpleNamespace(prompts=["a"] * (MAX_PROMPTS + 1), suffix=suffix, images=[], options=SimpleNamespace(n=1))
    with pytest.raises(BadRequest, match=f"{MAX_PROMPTS + 1} prompts are more than {MAX_PROMPTS}"):
        rendered(spec, SimpleNamespace(tokenizer=None))
