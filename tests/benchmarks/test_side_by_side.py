"""benchmarks/side_by_side.py without servers."""

from __future__ import annotations

import pytest

from benchmarks import side_by_side


@pytest.fixture
def seeds(monkeypatch, tmp_path):
    """Of every load that an invocation runs."""

    def invoke() -> list[tuple[str, int]]:
        found = []

        async def run_load(url, load, seed, tokenizer):
            found.append((url, seed))
            return {figure: 1.0 for figure in side_by_side.TITLES}

        monkeypatch.setattr(side_by_side, "run_load", run_load)
        assert side_by_side.main([str(tmp_path / "out.json"), "a=http://a", "b=http://b", "--loads", "c1"]) == 0
        return found

    return invoke


def test_servers_of_an_invocation_get_the_same_prompts_and_no_others_do(seeds, capsys):
    first, second = seeds(), seeds()
    for (_, a), (_, b) in zip(first[::2], first[1::2]):
        assert a == b
    assert len({seed for _, seed in first + second}) == 4, "two rounds each"
