"""`quire check` of several models prints each plan, and the error of each that has none."""

from __future__ import annotations

import pytest

from quire.cli.main import main


@pytest.mark.slow
def test_each_model_has_its_plan(checkpoint, tmp_path, capsys):
    good = checkpoint("qwen3")
    assert main(["check", good, str(tmp_path / "none"), "--alias", f"fast={good}"]) == 1
    found = capsys.readouterr()
    assert found.out.count("  weights  ") == 1 and found.out.splitlines()[-1] == "none:"
    assert "there is no folder" in found.err
    assert main(["check", good, good]) == 1
    assert "is taken by" in capsys.readouterr().err
