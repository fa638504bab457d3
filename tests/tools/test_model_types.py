"""The table of all model types."""

from __future__ import annotations

import pytest

from quire.worker.models.registry import DECODERS, WRAPPERS
from tools.model_types import FILE, data, page, state, types_of_transformers, why_not


def test_the_page_is_current():
    assert FILE.read_text(encoding="utf-8") == page(), "run: python -m tools.model_types"


def test_no_type_and_no_family_is_missing():
    known, text = data(), page()
    missing = types_of_transformers().keys() - known["types"].keys()
    assert not missing, "read the data anew with the newest transformers (tools/model_types.py)"
    listed = {name for entry in known["types"].values() for name in entry["names"]}
    for name in (*DECODERS, *WRAPPERS):
        assert name in listed or f"| {name} |" in text


@pytest.mark.parametrize(
    ("names", "reason", "how"),
    [
        (["LlamaForCausalLM"], "", "`llama.py`"),
        (["Qwen3VLForConditionalGeneration"], "", "`vision/qwen3_vl.py`"),
        (["Llama4ForConditionalGeneration"], "", "its text"),
        (["InklingForCausalLM"], "", "no: only files with its encoders"),
        (["SomeForCausalLM"], "", "transformers' implementation"),
        (["SomeForCausalLM"], "it has an encoder", "no: it has an encoder"),
        (["SomeForCausalLM"], "for vectors and classes only", "transformers' implementation, for vectors"),
        (["SomeForCausalLM"], None, "no: no file for it"),
    ],
)
def test_states(names, reason, how):
    assert state(names, reason).startswith(how)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["apertus", "bloom", "bart", "rwkv", "xglm", "florence2"])
def test_reasons_are_those_of_the_installed_transformers(model_type):
    entry = data()["types"][model_type]
    assert why_not(model_type, entry["names"]) == entry["why_not"]
