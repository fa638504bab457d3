"""benchmarks/siblings.py: the shapes are models that quire serves, and caches have the sizes that their layers need."""

from __future__ import annotations

import pytest

from benchmarks.siblings import MODELS, cache_bytes, preview_of, write_config


@pytest.mark.parametrize("name", MODELS)
def test_caches(name, tmp_path):
    write_config(name, str(tmp_path))
    ready = preview_of(str(tmp_path), 8192, threads=1)
    short, long = (cache_bytes(ready, tokens) for tokens in (2048, 8192))
    assert 0 < short < long
    if name == "deepseek-v3":  # 8 layers of 512 + 64 numbers in bfloat16
        assert long == 8192 * 8 * 576 * 2
    if name == "qwen3-moe":  # 8 layers of 4 heads of 64, keys and values
        assert long == 8192 * 8 * 4 * 64 * 2 * 2
