"""Plans of the models of a server of several."""

from __future__ import annotations

import tempfile

from quire.cli import plan_models
from quire.configs.config import Config


def test_without_a_folder_for_temporary_files_there_is_an_error_instead_of_a_plan(monkeypatch):
    def mkdtemp(*given, **options):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(plan_models, "_private_bytes", lambda: 0)
    assert plan_models.planned(Config.from_flat(model="x")).error == "[Errno 2] No usable temporary directory found"
