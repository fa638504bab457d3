"""Writes docs/model-types.md, the table of all model types: `python -m tools.model_types`.

`model_types.json` has the types of transformers with their architectures, the architectures of vLLM and of llama.cpp's
converter, and for each type without a file of quire's the reason why transformers' implementation cannot run it, ""
if it can. To update it with the newest transformers installed and the sources of the others
(vLLM's `model_executor/models/registry.py`, llama.cpp's `conversion/__init__.py`):

    python -m tools.model_types VLLM_VERSION REGISTRY_FILE LLAMA_CPP_VERSION CONVERSION_FILE
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.worker.models.registry import DRAFTING, MODELS, REFUSED, WRAPPERS, read_model_spec

FILE = Path(__file__).parent.parent / "docs" / "model-types.md"
DATA = Path(__file__).with_name("model_types.json")
# dictionaries in transformers' `modeling_auto` whose types are listed
MAPPINGS = {
    "text": ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"),
    "images and sound": ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ"),
    "encoders": ("MASKED_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION"),
}
# dictionaries in vLLM's registry without models
_NOT_MODELS = ("_SPECULATIVE", "_TRANSFORMERS", "_PREVIOUSLY", "_OOT", "_VLLM", "_SUBPROCESS")
_OF_DRAFTERS = ("MTP", "Eagle", "DFlash", "Medusa", "Speculator", "Draft")
# parts of messages, and the reasons of the table
_SHORT = {
    "no causal language model": "no file for its encoder",
    "its attention is not causal": "no file for it as an encoder; its attention is not causal",
    "a pass without transformers' own cache": "it needs more than tokens, positions and the attention interface",
    "layers attend through": "not every layer attends once through transformers' attention interface",
    "must be a whole number": "its default configuration has an unusual number",
}
_VECTORS = "for vectors and classes only"
_HEAD = """# Every model type

Written by `python -m tools.model_types`. **quire** says how a type is served: by a file of its own in
`worker/models/`, by transformers' implementation over quire's attention ([models.md](models.md)), or not, and why.
The other columns say whether a program knows the type: transformers {transformers}, vLLM {vllm}, llama.cpp's converter
{llama_cpp}.
"""


def data() -> dict[str, Any]:
    """Return the contents of `model_types.json`."""
    return json.loads(DATA.read_text(encoding="utf-8"))


def state(names: list[str], why_not: str | None) -> str:
    """Return how a type with the architectures `names` is served. `why_not` is None if transformers lacks the type."""
    for name in names:
        if name in REFUSED:
            return f"no: {REFUSED[name]}"
    if own := next((name for name in names if name in MODELS), None):
        return f"`{MODELS[own].split(':')[0]}.py`"
    if wrapper := next((name for name in names if name in WRAPPERS), None):
        tower = WRAPPERS[wrapper].tower.split(":")[0]
        return f"`{WRAPPERS[wrapper].folder}/{tower}.py`" if tower else "its text"
    if why_not is None:
        return "no: no file for it, and transformers has no language model of it"
    if why_not == _VECTORS:
        return f"transformers' implementation, {_VECTORS}"
    return f"no: {why_not}" if why_not else "transformers' implementation"


def page() -> str:
    """Return the text of docs/model-types.md."""
    known = data()
    versions = {key.replace(".", "_"): known[key] for key in ("transformers", "vllm", "llama.cpp")}
    text, listed = _HEAD.format(**versions), set()
    for kind in MAPPINGS:
        rows = {name: entry for name, entry in known["types"].items() if entry["kind"] == kind}
        text += f"\n## Types of transformers: {kind}\n\n| type | vLLM | llama.cpp | quire |\n|---|---|---|---|\n"
        for name, entry in sorted(rows.items()):
            listed.update(entry["names"])
            others = (_mark(known[program], entry["names"]) for program in ("vllm_names", "llama.cpp_names"))
            text += f"| {name} | {' | '.join(others)} | {state(entry['names'], entry['why_not'])} |\n"
    text += "\n## Other architectures\n\n"
    text += "| architecture | vLLM | llama.cpp | quire |\n|---|---|---|---|\n"
    own = {name for name in (*MODELS, *WRAPPERS, *REFUSED) if name.endswith(("ForCausalLM", "ConditionalGeneration"))}
    for name in sorted((own | {*known["vllm_names"], *known["llama.cpp_names"]}) - listed - set(DRAFTING)):
        if not any(part in name for part in _OF_DRAFTERS):
            others = (_mark(known[program], [name]) for program in ("vllm_names", "llama.cpp_names"))
            text += f"| {name} | {' | '.join(others)} | {state([name], None)} |\n"
    return text


def _mark(program: list[str], names: list[str]) -> str:
    return "yes" if set(program) & set(names) else ""


def types_of_transformers() -> dict[str, tuple[str, list[str]]]:
    """Return (first kind, architectures) of each type that the installed transformers lists."""
    from transformers.models.auto import modeling_auto as auto

    kinds: dict[str, str] = {}
    names: dict[str, set[str]] = {}
    tables = [(kind, f"MODEL_FOR_{mapping}_MAPPING_NAMES") for kind in MAPPINGS for mapping in MAPPINGS[kind]]
    for kind, table in tables:
        for model_type, found in getattr(auto, table).items():
            kinds.setdefault(model_type, kind)
            names.setdefault(model_type, set()).update([found] if isinstance(found, str) else found)
    for model_type in kinds:
        found = auto.MODEL_MAPPING_NAMES.get(model_type, ())
        names[model_type].update([found] if isinstance(found, str) else found)
    return {model_type: (kind, sorted(names[model_type])) for model_type, kind in kinds.items()}


def why_not(model_type: str, names: list[str]) -> str:
    """Return why transformers' implementation cannot run a type with its default settings, "" if it can; `_VECTORS` if
    it can run another architecture than the first one.
    """
    first, *others = [_why_not(model_type, name) for name in names]
    return _VECTORS if first and "" in others else first


def _why_not(model_type: str, name: str) -> str:
    import transformers

    try:
        config = transformers.CONFIG_MAPPING[model_type]()
        for part in {id(part): part for part in (config, config.get_text_config(decoder=True))}.values():
            if not isinstance(getattr(part, "layer_types", None), list) and hasattr(part, "num_hidden_layers"):
                part.num_hidden_layers = min(part.num_hidden_layers, 4)
        config.architectures = [name]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            read_model_spec(folder, "transformers")
    except ValueError as error:
        reason = str(error).split("cannot run with transformers: ")[-1]
        return next((short for start, short in _SHORT.items() if start in reason), reason.replace("|", "/")[:120])
    except Exception as error:  # a configuration without default settings
        return f"its default configuration cannot be made ({type(error).__name__})"
    return ""


def read_anew(vllm: str, registry: str, llama_cpp: str, conversion: str) -> dict[str, Any]:
    """Return new contents of `model_types.json`, from the installed transformers and the sources of the others."""
    import transformers

    served = {*MODELS, *WRAPPERS, *REFUSED}
    types = {
        model_type: {
            "kind": kind,
            "names": names,
            "why_not": "" if served & set(names) else why_not(model_type, names),
        }
        for model_type, (kind, names) in types_of_transformers().items()
    }
    in_vllm = [name for table, names in _tables(registry) if not table.startswith(_NOT_MODELS) for name in names]
    in_llama_cpp = [name for table, names in _tables(conversion) if table == "TEXT_MODEL_MAP" for name in names]
    return {
        "transformers": transformers.__version__,
        "vllm": vllm,
        "llama.cpp": llama_cpp,
        "types": dict(sorted(types.items())),
        "vllm_names": sorted(set(in_vllm)),
        "llama.cpp_names": sorted({name.rsplit(".", 1)[-1] for name in in_llama_cpp}),
    }


def _tables(path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, keys) of each dictionary that a Python file assigns."""
    for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(getattr(node, "value", None), ast.Dict):
            yield target.id, [key.value for key in node.value.keys if isinstance(key, ast.Constant)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        DATA.write_text(json.dumps(read_anew(*sys.argv[1:]), indent=1) + "\n", encoding="utf-8")
    FILE.write_text(page(), encoding="utf-8")
