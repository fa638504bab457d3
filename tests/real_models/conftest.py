"""Real models, which `make install-dev` downloads (checkpoints/packaged.py); without one its tests are skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.checkpoints import packaged

# written for these tests
PROSE = (
    "The lighthouse keeper counted the ships every evening, and every evening he wrote the number in a small green "
    "book. In winter there were few of them, and he spent the long hours repairing nets and listening to the wind. "
    "One night in February the lamp went out. He climbed the stairs with a candle in his hand, found that the oil was "
    "frozen, and understood that he had to carry it up warm, one can at a time, until the morning. Three ships passed "
    "while he worked. The captain of the last one sent a letter in the spring. It said that the light had been weak, "
    "but that nobody on board had ever been so glad to see it, and that the crew would like to know the name of the "
    "man who kept it burning."
)


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """The file or folder of a model by name."""

    def get(name: str) -> Path:
        if (path := packaged.cached(name)) is None:
            pytest.skip(f"{name} is not in {packaged.folder()}; tools/fetch_models.py downloads it")
        return path

    return get


def reference_tokenizer(path: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
