"""A few hundred requests of `tests/helpers/fuzz_api.py`, which sends 20,000."""

from __future__ import annotations

import pytest

from tests.helpers.fuzz_api import fuzz_both


@pytest.mark.slow
def test_requests_made_from_the_document_find_no_failure():
    pytest.importorskip("schemathesis")
    for kind, result in fuzz_both(150, seconds=12).items():
        assert not result.failures, f"{kind}: {result.failures}"
        assert result.num_requests >= 50, f"{kind}: {result.num_requests}"
