"""The text of a custom tool's call, in pieces of any size, against the JSON library."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.server.request.custom_input import CustomInput


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces, text = [*pieces, text[:size]], text[size:]
    return [*pieces, text]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans(), st.lists(st.integers(0, 7)))
@example('🙂"\\\n\x7f', True, [1] * 60)
def test_pieces_add_up_to_the_text(text, ascii_only, sizes):
    arguments, custom = json.dumps({"input": text}, ensure_ascii=ascii_only), CustomInput()
    assert "".join(custom.push(piece) for piece in cut(arguments, sizes)) == text


@settings(deadline=None)
@given(st.text(), st.lists(st.integers(0, 7)))
@example('{"input": "\\ud800 alone"}', [3, 9, 2])
def test_anything_else_is_taken(text, sizes):
    custom = CustomInput()
    assert isinstance("".join(custom.push(piece) for piece in cut(text, sizes)), str)


@pytest.mark.parametrize("space", ["", " ", "\n" * 3, " " * 100])
def test_white_space_may_come_before_the_text(space):
    text = f'{space}{{{space}"input"{space}:{space}"a b"{space}}}'
    for sizes in ([], [1] * len(text)):
        custom = CustomInput()
        assert "".join(custom.push(piece) for piece in cut(text, sizes)) == "a b"


def test_what_is_no_such_object_is_given_as_it_is():
    assert CustomInput().push('{"code": "x"}') == '{"code": "x"}'
