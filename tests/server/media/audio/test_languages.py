"""Languages by code, code and region, and English name."""

from __future__ import annotations

import pytest

from quire.server.media.audio.languages import NAMES, asked_code


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (None, None),
        ("", None),
        ("auto", None),
        ("en", "en"),
        (" EN ", "en"),
        ("en-US", "en"),
        ("zh_CN", "zh"),
        ("zh-Hant-TW", "zh"),
        ("yue-HK", "yue"),
        ("English", "en"),
        ("haitian creole", "ht"),
        ("jv", "jw"),
        ("xx-US", "xx-us"),
        ("klingon", "klingon"),
    ],
)
def test_codes(asked, code):
    assert asked_code(asked) == code


def test_every_name_and_code():
    assert all(asked_code(one) == code for code, name in NAMES.items() for one in (code, name))
