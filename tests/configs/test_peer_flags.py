"""Other servers' flags: each one of their `--help` texts, kept as lists in `peer_flags/`, has a row that does what the
table says.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from quire.cli import main as cli
from quire.configs.options import all_options, config_from
from quire.configs.peers.groups import Kind
from quire.configs.peers.reading import Given, is_flag, translate
from quire.configs.peers.table import OPTIONAL, SERVERS, SWITCH, rows, rows_of
from quire.server.engines.spare import SpareEngine
from tests.configs.peer_examples import EXAMPLES

LISTS = Path(__file__).parent / "peer_flags"
OF = {"vllm": "vLLM", "sglang": "SGLang", "llama": "llama.cpp", "ollama": "Ollama", "tgi": "TGI"}
OWN = {flag for option in all_options().values() for flag in option.flags}
OWN |= {f"--no-{option.name.replace('_', '-')}" for option in all_options().values() if option.type is bool}
OWN |= {"--help", "-h", "--config"}
GENERIC = {"int": "1", "float": "0.5", "str": "some"}


@pytest.fixture
def start(monkeypatch, capsys):
    """Run `quire serve ARGS` up to the server: (config, warnings), or the message with which it ends with status 2."""
    for variable in [name for name in os.environ if name.startswith(("QUIRE_", "LLAMA_", "OLLAMA_", "VLLM_"))]:
        monkeypatch.delenv(variable)
    calls = []

    def serve(config, _, warnings, *launcher, **spare) -> int:
        calls.append((config, warnings))
        return 0

    monkeypatch.setattr(SpareEngine, "prepare", lambda self, parallel: None)
    monkeypatch.setitem(sys.modules, "quire.server.launch", type("launch", (), {"serve": staticmethod(serve)}))
    monkeypatch.setitem(sys.modules, "quire.server.models.launch", type("launch", (), {"ModelsLauncher": None}))

    def run(*arguments: str):
        try:
            assert cli.main(["serve", *arguments]) == 0
        except SystemExit as exit:
            message = capsys.readouterr().err
            assert exit.code == 2 and message.count("\n") == 1, message
            return message
        return calls.pop()

    return run


def listed(path: Path) -> list[tuple[str, str]]:
    """(flag, values) of a list; a switch that can be turned off has two."""
    found = []
    for line in path.read_text(encoding="utf-8").split():
        name, takes = re.fullmatch(r"([^=]+)(.*)", line).groups()
        names = [name.replace("[no-]", ""), name.replace("[no-]", "no-")] if "[no-]" in name else [name]
        found += [(one, takes) for one in names]
    return found


@pytest.mark.parametrize("path", sorted(LISTS.glob("*.txt")), ids=lambda path: path.stem)
def test_every_flag_of_the_help_texts_has_a_row(path):
    table = {row.name: row for row in rows_of(OF[path.stem.split("-")[0]])}
    flags = listed(path)
    assert len(flags) > 20 and not {name for name, _ in flags} - table.keys()
    wrong = [
        (name, takes, table[name].takes)
        for name, takes in flags
        if table[name].kind in (Kind.RENAMED, Kind.NO_EFFECT) and not table[name].is_variable
        if takes != table[name].takes
    ]
    assert not wrong


def test_the_rows_of_a_name_agree_and_leave_our_flags_alone():
    meanings = defaultdict(set)
    for server in SERVERS:
        names = [row.name for row in rows_of(server)]
        assert len(names) == len(set(names)), server
        for row in rows_of(server):
            same = row.kind == Kind.SAME
            assert same == (row.name in OWN), row
            group = row.group
            meanings[row.name].add((row.kind, group.option, group.key, group.harmless, "" if same else row.takes))
    assert not {name: found for name, found in meanings.items() if len(found) > 1}


def test_notes_name_flags_that_exist():
    for row in rows().values():
        for flag in re.findall(r"--[a-z][a-z-]+[a-z]", row.group.note):
            assert flag in OWN | rows().keys() | {"--version", "--system-prompt"}, row
        assert not row.group.option or row.group.option in all_options(), row


def note_of(row) -> str:
    """The reason that is shown, which is that of the first server."""
    return rows()[row.name].group.note


def texts_of(row, text: str) -> list[str]:
    return [] if row.takes == SWITCH else [text]


def arguments(row, text: str, monkeypatch) -> list[str]:
    """The command line with the flag, or an empty one after setting the variable."""
    if row.is_variable:
        monkeypatch.setenv(row.name, text)
        return ["m"]
    return ["m", row.name, *texts_of(row, text)]


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
def test_flags_without_effect_start_with_one_warning_and_strict_flags_refuse_them(start, monkeypatch, server):
    for row in rows_of(server):
        if row.kind != Kind.NO_EFFECT:
            continue
        with monkeypatch.context() as patch:
            given = arguments(row, "on" if row.takes == OPTIONAL else "1", patch)
            config, warnings = start(*given)
            assert len(warnings) == 1 and row.name in warnings[0] and note_of(row) in warnings[0], (row, warnings)
            assert config == start("m")[0] if not row.is_variable else config.model.model == "m"
            assert f"--strict-flags: {warnings[0]}" in start(*given, "--strict-flags")


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
def test_refused_flags_end_with_their_reason(start, monkeypatch, server):
    for row in rows_of(server):
        if row.kind != Kind.REFUSED:
            continue
        with monkeypatch.context() as patch:
            message = start(*arguments(row, "7", patch))
            assert isinstance(message, str), row
            assert row.name in message and note_of(row) in message and "did you mean" not in message, message
        for text in row.group.harmless if row.takes != SWITCH else ():
            with monkeypatch.context() as patch:
                found = start(*arguments(row, text, patch))
                assert not isinstance(found, str), (row, text, found)
                assert len(found[1]) == 1 and row.name in found[1][0], (row, text)


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
def test_renamed_flags_set_what_they_mean(start, monkeypatch, server):
    seen = set()
    for row in rows_of(server):
        if row.kind != Kind.RENAMED:
            continue
        key = next((key for key in EXAMPLES if row.name in key.split()), None)
        assert key, f"{server}: no example of {row.name}"
        seen.add(key)
        for text, expected in EXAMPLES[key]:
            with monkeypatch.context() as patch:
                found = start(*_with_partner(row, arguments(row, text, patch), text, patch))
                if isinstance(expected, str) and expected.startswith("error: "):
                    assert isinstance(found, str) and expected.removeprefix("error: ") in found, (row, text, found)
                    continue
                assert not isinstance(found, str), (row, text, found)
                config, warnings = found
                section = getattr(config, all_options()[row.group.option].section)
                value = getattr(section, row.group.option)
                default = all_options()[row.group.option].default
                if expected is None:  # left alone
                    assert (value, warnings) == (default, []), (row, text, value)
                elif expected == "warning":
                    assert value == default and len(warnings) == 1, (row, text, warnings)
                else:
                    assert (_plain(value), warnings) == (expected, []), (row, text, value)


def _with_partner(row, given: list[str], text: str, patch) -> list[str]:
    """Keys and values have one type, so that both are given; a file of a repository needs the repository, which is the
    model.
    """
    if row.group.option == "model":
        if row.group.key == "file" and row.is_variable:
            patch.setenv("LLAMA_ARG_HF_REPO", "org/name:Q4_0")
        return [*given[1:], *(["-hf", "org/name:Q4_0"] if row.group.key == "file" and not row.is_variable else [])]
    if row.group.option == "kv_cache_dtype" and row.group.key:
        if row.is_variable:
            other = {"k": "LLAMA_ARG_CACHE_TYPE_V", "v": "LLAMA_ARG_CACHE_TYPE_K"}[row.group.key]
            patch.setenv(other, text)
            return given
        return [*given, "-ctv" if row.group.key == "k" else "-ctk", text]
    return given


def _plain(value):
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


@pytest.mark.parametrize("server", ["vLLM", "SGLang", "llama.cpp", "TGI"])
def test_flags_of_the_same_name_are_ours(start, server):
    for row in rows_of(server):
        option = all_options().get(row.name[2:].replace("-", "_"))
        if row.kind != Kind.SAME or option is None or option.check or option.unit == "mapping" or option.removed:
            continue
        text = option.choices[-1] if option.choices else "32k" if option.unit == "length" else None
        text = text or GENERIC.get(option.type.__name__, "")
        if option.name in ("max_body_size", "max_image_bytes", "num_gpu_blocks_override"):
            text = "4096"
        rest = [] if option.name == "model" else ["m"]
        found = start(*rest, row.name, *([] if option.type is bool else [text]))
        assert not isinstance(found, str), found
        config, warnings = found
        value = getattr(getattr(config, option.section), option.name)
        assert not warnings and value == (True if option.type is bool else option.parse(text, row.name)), row


def test_commands_as_people_type_them(start):
    config, warnings = start("-m", "x.gguf", "-c", "8192", "-ngl", "99", "-fa", "-np", "4", "--jinja", "--port", "80")
    assert (config.model.model, config.model.max_model_len, config.scheduler.max_num_seqs) == ("x.gguf", "8192", 4)
    assert [warning.split(":")[0] for warning in warnings] == ["-fa", "--jinja"] and config.server.port == 80
    config, _ = start("-hf", "org/name:Q8_0", "-b", "2048", "-ub", "512", "-ctk", "q8_0", "-ctv", "q8_0")
    assert config.model.model == "org/name:Q8_0" and config.cache.kv_cache_dtype == "int8"
    assert config.scheduler.max_num_batched_tokens == 512
    config, warnings = start("m", "--tp", "2", "--enable_chunked_prefill", "--cudagraph-capture-sizes", "1", "2")
    assert config.parallel.tensor_parallel_size == 2 and len(warnings) == 2
    # the values of a flag end before another server's flag
    config, _ = start("--served-model-name", "a", "--temp=0", "x.gguf")
    assert (config.model.model, config.server.served_model_name) == ("x.gguf", ["a"])


@pytest.mark.parametrize(
    "given, expected",
    [
        (["-m", "a", "b"], "the model is set twice, by MODEL and by -m"),
        (["m", "-c", "1", "--max-model-len", "2"], "-c and --max-model-len set the same: give one"),
        (["m", "--tp", "1", "-tp", "2"], "--tp 1 and -tp 2 set the same: give one"),
        (["m", "-ctk", "q8_0"], "keys and values have one type"),
        (["m", "-ctk", "q4_0", "-ctv", "q4_0"], "-ctk: q4_0: keys and values have the type of the activations, or 8"),
        (["-hff", "f.gguf"], "-hff: a file of a repository needs -hf"),
        (["m", "-c"], "-c: expected one argument"),
        (["m", "-c", "--jinja"], "-c: expected one argument"),
        (["m", "-c", "many"], "-c: expected auto or a number of tokens"),
        (["m", "-hx"], "unknown flag -hx\n"),
        (["m", "--top-kk", "5"], "unknown flag --top-kk; did you mean --top-k?"),
        (["m", "--api-kye", "5"], "unknown flag --api-kye; did you mean --api-key?"),
        (["m", "--frobnicate"], "unknown flag --frobnicate\n"),
        (["m", "--quantization", "fp8"], "--quantization: fp8: 16-bit weights are rounded to int8 or int4"),
        (["m", "--dtype", "int8"], "--dtype: int8: the type of weights and activations has 16 or 32 bits"),
        (["m", "--device", "mps"], "--device: mps: devices are cpu and cuda"),
        (["m", "--device", "cuda:1"], "--device: cuda:1: devices are cpu and cuda; CUDA_VISIBLE_DEVICES"),
        (["m", "--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype: fp8_e5m2: keys and values have"),
        (["m", "--max-tokens", "5"], "--max-tokens 5: refused: a field of requests, max_tokens"),
    ],
)
def test_wrong_flags_are_explained(start, given, expected):
    assert expected in start(*given)


@pytest.mark.parametrize(
    "given, section, name, value",
    [
        (["--device", "gpu"], "device", "device", "cuda"),
        (["--device", "none"], "device", "device", "cpu"),
        (["--kv-cache-dtype", "q8_0"], "cache", "kv_cache_dtype", "int8"),
        (["--log-level", "WARN".lower()], "server", "log_level", "warning"),
        (["--pooling", "last"], "model", "pooling", "lasttoken"),
        (["--allowed-origins", '["http://a", "http://b"]'], "server", "allowed_origins", ["http://a", "http://b"]),
    ],
)
def test_values_of_others_are_understood(start, given, section, name, value):
    config, warnings = start("m", *given)
    assert getattr(getattr(config, section), name) == value and not warnings


@pytest.mark.parametrize(
    "given", [("--quantization", "awq"), ("--load-format", "gguf"), ("--attention-backend", "FLASHINFER")]
)
def test_values_of_others_without_effect_are_warned_of(start, given):
    config, warnings = start("m", *given)
    assert config == start("m")[0] and len(warnings) == 1 and warnings[0].startswith(" ".join(given) + ": no effect")
    assert "--strict-flags" in start("m", *given, "--strict-flags")


def test_strict_flags_in_every_spelling_and_with_removed_settings(start, monkeypatch, tmp_path):
    assert "--strict-flags: --cache-reuse 16: no effect" in start("m", "--cache-reuse", "16", "--strict-flags")
    (tmp_path / "f.yaml").write_text("strict_flags: true\nswap_space: 4\n")
    assert "--strict-flags: --swap-space 4: no effect" in start("m", "--config", str(tmp_path / "f.yaml"))
    monkeypatch.setenv("QUIRE_STRICT_FLAGS", "1")
    assert "--strict-flags: --swap-space 4: no effect" in start("m", "--swap-space", "4")
    assert start("m")[1] == []


def test_files_and_python_take_names_of_others(start, tmp_path, caplog):
    values = {"context-length": 4096, "enable_chunked_prefill": True, "async_scheduling": False, "tp": 2}
    file = tmp_path / "f.yaml"
    file.write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items()))
    config, warnings = start("m", "--config", str(file))
    assert [warning.split(":")[0] for warning in warnings] == ["--enable-chunked-prefill"]
    offline = config_from({"model": "m"} | {name.replace("-", "_"): value for name, value in values.items()})
    for one in (config, offline):
        assert (one.model.max_model_len, one.parallel.tensor_parallel_size) == ("4096", 2)
        assert one.scheduler.steps_in_flight == 1
    assert [record.message for record in caplog.records] == warnings
    file.write_text("rope_scaling: {type: yarn}")
    assert f"{file}: --rope-scaling" in start("m", "--config", str(file))
    with pytest.raises(ValueError, match=r"--rope-scaling .*: refused"):
        config_from({"model": "m", "rope_scaling": {"type": "yarn"}})


def test_variables_of_others_yield_to_every_source_of_ours(start, monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1024")
    monkeypatch.setenv("OLLAMA_CONTEXT_LENGTH", "1024")
    assert start("m")[0].model.max_model_len == "1024"
    (tmp_path / "f.yaml").write_text("max_model_len: 2048")
    assert start("m", "--config", str(tmp_path / "f.yaml"))[0].model.max_model_len == "2048"
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "4096")
    assert start("m")[0].model.max_model_len == "4096"
    assert start("m", "-c", "8192")[0].model.max_model_len == "8192"
    monkeypatch.setenv("OLLAMA_CONTEXT_LENGTH", "2048")
    assert "LLAMA_ARG_CTX_SIZE=1024 and OLLAMA_CONTEXT_LENGTH=2048 set the same" in start("m")


def test_unknown_variables_of_llamacpp_are_warned_of_and_misspelled_ones_of_ours_explained(start, monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_NEW", "1")
    assert start("m")[1] == ["LLAMA_ARG_NEW: no effect: quire does not know it"]
    monkeypatch.setenv("QUIRE_TP_SIZE", "2")
    assert "unknown environment variable QUIRE_TP_SIZE: set QUIRE_TENSOR_PARALLEL_SIZE" in start("m")


def test_commands_refuse_what_others_flags_set_elsewhere(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "throughput", "m", "-a", "name"])
    assert "--served-model-name, which another server's flag sets, has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "-hf"],
        ["check", "--max-model", "1"],
        ["run", "--sys", "x"],
        ["chat", "--temp", "1"],
        ["complete", "--max-tok", "1"],
        ["bench", "serve", "--base", "u"],
        ["run-batch", "--input-f", "a", "-o", "b"],
        ["health", "--ur", "u"],
        ["quantize", "m", "o", "--form", "int4"],
        ["collect-env", "--he"],
    ],
    ids=" ".join,
)
def test_no_command_takes_shortened_flags(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        cli.main(command)
    assert exit.value.code == 2 and "error: " in capsys.readouterr().err


def test_flags_are_told_from_values():
    assert [text for text in ("-1", "-0.5", "-", "-- a", "x", "-c", "--x=1") if is_flag(text)] == ["-c", "--x=1"]
    assert translate([Given("-c", ("1",)), Given("-c", ("2",))]).settings == {"max_model_len": "2"}
