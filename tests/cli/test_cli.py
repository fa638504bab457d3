"""The command line: three spellings of each setting, their precedence, and errors that name the setting to change."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quire.cli import collect_env
from quire.cli import main as cli
from quire.configs import sources
from quire.configs.options import all_options, config_from, parse_count, removed_settings
from quire.configs.sources import PRESETS
from quire.server.engines.spare import SpareEngine
from quire.server.frontends import descriptors


@pytest.fixture
def served(monkeypatch):
    """Run `quire serve ARGS` up to the call of quire.server.launch.serve; returns (config, sources) of that call."""
    for variable in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(SpareEngine, "prepare", lambda self, parallel: None)

    def run(*arguments: str):
        calls = []
        launch = type(
            "launch",
            (),
            {"serve": staticmethod(lambda config, origins, *_, **__: calls.append((config, origins)) or 0)},
        )
        monkeypatch.setitem(sys.modules, "quire.server.launch", launch)
        assert cli.main(["serve", *arguments]) == 0
        return calls[0]

    return run


@pytest.fixture
def refused(served, capsys):
    """Run `quire serve ARGS`, which must fail with status 2 and one line; returns the line."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit:
            served(*arguments)
        assert exit.value.code == 2
        message = capsys.readouterr().err
        assert message.startswith("quire serve: error: ") and message.count("\n") == 1
        return message

    return run


def test_the_engine_inherits_the_limit_of_files(served, monkeypatch):
    calls = []
    monkeypatch.setattr(descriptors, "raise_descriptor_limit", lambda: calls.append("limit"))
    monkeypatch.setattr(SpareEngine, "prepare", lambda self, parallel: calls.append("engine"))
    served("some/model")
    assert calls == ["limit", "engine"]


def test_flags_reach_their_sections(served):
    config, _ = served(
        "some/model",
        "--max-num-seqs",
        "7",
        "--dtype=float32",
        "--port",
        "0",
        "--gpu-memory-utilization",
        "0.5",
        "--enforce-eager",
        "--no-enable-prefix-caching",
    )
    assert (config.model.model, config.scheduler.max_num_seqs, config.model.dtype, config.server.port) == (
        "some/model",
        7,
        "float32",
        0,
    )
    assert config.cache.gpu_memory_utilization == 0.5
    assert config.device.enforce_eager is True and config.cache.enable_prefix_caching is False


def test_underscores_are_dashes_in_flags_but_not_in_values(served):
    config, _ = served("m", "--served_model_name=a_b", "--max_num_seqs", "3", "--no-enable_prefix_caching")
    assert (
        config.server.served_model_name == ["a_b"]
        and config.scheduler.max_num_seqs == 3
        and not config.cache.enable_prefix_caching
    )


def test_lists_take_several_values_and_several_flags(served):
    config, _ = served("m", "--served-model-name", "a", "b", "--served-model-name", "c", "--api-key", "k")
    assert config.server.served_model_name == ["a", "b", "c"] and config.server.api_key == ["k"]


def test_a_list_flag_does_not_swallow_the_model(refused):
    assert "--api-key took './model'" in refused("--api-key", "k", "./model")


@pytest.mark.parametrize("last", ["org/name", "org/name-GGUF:Q4_K_M", "model.gguf", "~/model", "/a/b", "."])
def test_a_list_flag_does_not_swallow_what_looks_like_a_model(refused, last):
    assert f"--served-model-name took '{last}'" in refused("--served-model-name", "k", last)


def test_a_list_flag_keeps_its_values_without_a_model(served):
    """The embedded model is served then."""
    config, _ = served("--api-key", "a", "b")
    assert config.server.api_key == ["a", "b"] and config.model.model.endswith("quire-tiny")
    config, _ = served("--allowed-origins", "https://a.example", "https://b.example")
    assert config.server.allowed_origins == ["https://a.example", "https://b.example"]


def test_precedence_is_flag_environment_file_default(served, tmp_path, monkeypatch):
    file = tmp_path / "settings.yaml"
    file.write_text("model: from-file\nmax-num-seqs: 1\nport: 1111\nmax_model_len: 4k\n")
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("QUIRE_PORT", "2222")
    config, origins = served("--config", str(file), "--port", "3333")
    assert (config.model.max_model_len, config.scheduler.max_num_seqs, config.server.port, config.server.host) == (
        "4000",
        2,
        3333,
        "127.0.0.1",
    )
    assert origins == {
        "model": f"file {file}",
        "max_model_len": f"file {file}",
        "max_num_seqs": "environment QUIRE_MAX_NUM_SEQS",
        "port": "command line",
    }


def test_environment_values(served, monkeypatch):
    for name, value in {
        "API_KEY": "a, b",
        "ENFORCE_EAGER": "yes",
        "ENABLE_PREFIX_CACHING": "0",
        "KV_CACHE_MEMORY_BYTES": "2G",
    }.items():
        monkeypatch.setenv(f"QUIRE_{name}", value)
    config, _ = served("m")
    assert (
        config.server.api_key == ["a", "b"] and config.device.enforce_eager and not config.cache.enable_prefix_caching
    )
    assert config.cache.kv_cache_memory_bytes == 2 * 2**30


def test_config_file_from_the_environment(served, tmp_path, monkeypatch):
    (tmp_path / "q.yaml").write_text("max_num_seqs: 9")
    monkeypatch.setenv("QUIRE_CONFIG", str(tmp_path / "q.yaml"))
    assert served("m")[0].scheduler.max_num_seqs == 9


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["m", "--max-modle-len", "3"], "unknown flag --max-modle-len; did you mean --max-model-len?"),
        (["m", "--enable-prefix-cache"], "did you mean --enable-prefix-caching?"),
        (["m", "--max-model", "3"], "unknown flag --max-model"),  # flags cannot be abbreviated
        (["m", "--port", "http"], "--port: expected a whole number, got 'http'"),
        (["m", "--port", "70000"], "--port: must be at most 65535, got 70000"),
        (["m", "--port"], "--port: expected one argument"),
        (["m", "--gpu-memory-utilization", "0"], "--gpu-memory-utilization: must be above 0"),
        (["m", "--gpu-memory-utilization", "nan"], "--gpu-memory-utilization: must be above 0"),
        (["m", "--max-num-seqs", "0"], "--max-num-seqs: must be at least 1"),
        (
            ["m", "--dtype", "bfloat"],
            "--dtype: 'bfloat' is not one of auto, float32, bfloat16, float16; did you mean bfloat16?",
        ),
        (["m", "--max-model-len", "0"], "--max-model-len: expected auto or a number of tokens"),
        (["m", "--kv-cache-memory-bytes", "2GB"], "--kv-cache-memory-bytes: expected a number of bytes"),
        (["m", "--distributed-executor-backend", "rays"], "is not one of uniproc, mp, ray"),
        (["m", "--api-key", ""], "--api-key: expected text that is not empty"),
        (["m", "--model", "n"], "the model is set twice"),
        (["m", "--config", "nowhere.yaml"], "no file nowhere.yaml; the presets are cpu, single-gpu, tp2"),
    ],
)
def test_wrong_flags_are_named(refused, arguments, expected):
    assert expected in refused(*arguments)


@pytest.mark.parametrize(
    "value, expected",
    [
        ("half", "float16"),
        ("float", "float32"),
        ("fp16", "float16"),
        ("bf16", "bfloat16"),
        ("fp32", "float32"),
        ("auto", "auto"),
    ],
)
def test_dtype_takes_the_usual_short_names(served, monkeypatch, value, expected):
    assert served("m", "--dtype", value)[0].model.dtype == expected
    monkeypatch.setenv("QUIRE_DTYPE", value)
    assert served("m")[0].model.dtype == expected
    assert config_from({"dtype": value}).model.dtype == expected


@pytest.mark.parametrize(
    "content, expected",
    [
        ("max_num_sqs: 3", "unknown setting max_num_sqs in {file}; did you mean max_num_seqs?"),
        ("max-num-seqs: many", "max-num-seqs in {file}: expected a whole number, got 'many'"),
        ("max_num_seqs: 2.5", "expected a whole number, got 2.5"),
        ("served_model_name: [a, no]", "expected text that is not empty, got False"),
        ("dtype: null", "dtype in {file}: expected text, got None"),
        ("port: 1\nport: 2", "{file}: port is given twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "{file}: max_num_seqs and max-num-seqs are the same setting"),
        ("- port", "{file}: expected `setting: value` lines"),
        ("port: 1\nhost: [", "{file}, line 2: not valid YAML"),
    ],
)
def test_wrong_files_are_named(refused, tmp_path, content, expected):
    file = tmp_path / "wrong.yaml"
    file.write_text(content)
    assert expected.format(file=file) in refused("m", "--config", str(file))


def test_unknown_and_wrong_variables_are_named(refused, monkeypatch):
    monkeypatch.setenv("QUIRE_MAX_NUM_SQS", "3")
    assert "unknown environment variable QUIRE_MAX_NUM_SQS; did you mean QUIRE_MAX_NUM_SEQS?" in refused("m")
    monkeypatch.delenv("QUIRE_MAX_NUM_SQS")
    monkeypatch.setenv("QUIRE_STRICT_PARAMS", "maybe")
    assert "QUIRE_STRICT_PARAMS: expected true or false, got 'maybe'" in refused("m")


def test_no_model_is_an_error_until_one_comes_with_quire(served, refused, monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "EMBEDDED_MODEL", tmp_path / "quire-tiny")
    assert "no model: give a folder, a GGUF file" in refused()
    (tmp_path / "quire-tiny").mkdir()
    (tmp_path / "quire-tiny" / "model.safetensors").write_bytes(b"")
    config, origins = served()
    assert config.model.model == str(tmp_path / "quire-tiny") and config.server.served_model_name == ["quire-tiny"]
    assert origins["model"] == "default (embedded model)"


def test_print_config_is_yaml_that_gives_the_same_config(served, tmp_path, capsys, monkeypatch):
    arguments = [
        "m",
        "--max-num-seqs",
        "5",
        "--served-model-name",
        "a: b",
        "c",
        "--kv-cache-memory-bytes",
        "1.5g",
        "--no-vllm-metrics",
        "--api-key",
        "hidden-key",
    ]
    monkeypatch.setenv("QUIRE_SEED", "42")
    with pytest.raises(SystemExit) as exit:
        served(*arguments, "--print-config")
    assert not exit.value.code
    printed = capsys.readouterr().out
    assert "hidden-key" not in printed
    lines = {line.split(":")[0]: line.rsplit("# ", 1)[1] for line in printed.splitlines() if "  # " in line}
    assert set(lines) == {*all_options(), "# api_key"} - {"api_key"}
    assert (lines["seed"], lines["max_num_seqs"], lines["port"]) == (
        "environment QUIRE_SEED",
        "command line",
        "default",
    )
    (tmp_path / "printed.yaml").write_text(printed)
    monkeypatch.delenv("QUIRE_SEED")
    again, _ = served("--config", str(tmp_path / "printed.yaml"), "--api-key", "hidden-key")
    monkeypatch.setenv("QUIRE_SEED", "42")
    assert again == served(*arguments)[0]


def test_a_removed_setting_is_accepted_in_every_spelling_and_warned_of(served, tmp_path, monkeypatch):
    removed = [option for option in all_options().values() if option.removed]
    assert [option.name for option in removed] == ["cache_reuse"]
    for option in removed:
        (tmp_path / "removed.yaml").write_text(f"{option.name}: 16\n")
        configs = [served("m", option.flag, "16")[0], served("m", "--config", str(tmp_path / "removed.yaml"))[0]]
        monkeypatch.setenv(option.variable, "16")
        configs += [served("m")[0], config_from({"model": "m", option.name: 16})]
        monkeypatch.delenv(option.variable)
        for config in configs:
            assert removed_settings(config) == [f"{option.flag} 16: {option.help}"]
            assert option.help.startswith("no effect")
        assert not removed_settings(served("m", option.flag, str(option.default))[0])


def test_help_shows_everyday_flags_and_help_all_every_flag(served, capsys):
    texts = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as exit:
            served(flag)
        assert not exit.value.code
        texts[flag] = capsys.readouterr().out
    for option in all_options().values():
        assert (option.flag + " " in texts["--help"].replace(",", " ").replace("\n", " ")) == option.everyday, (
            option.flag
        )
        assert option.flag in texts["--help-all"]
    assert texts["--help"].count("  --") <= 40
    assert "fake" not in texts["--help-all"]


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_are_valid(served, path):
    expected = yaml.safe_load(path.read_text())
    _, origins = served("m", "--config", path.stem)
    assert origins == {"model": "command line"} | dict.fromkeys(expected, f"file {path}")


def test_the_settings_page_names_every_everyday_flag():
    page = (PRESETS.parent / "docs" / "settings.md").read_text()
    table = page[page.index("| flag |") : page.index("Presets:")]
    assert {option.flag for option in all_options().values() if option.everyday} - {"--model"} == set(
        re.findall(r"`(--[a-z-]+)`", table)
    )


def test_unknown_commands_and_version(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["serv"])
    assert exit.value.code == 2 and "did you mean serve?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert not exit.value.code and capsys.readouterr().out.startswith("quire 0.")


def test_config_from_checks_python_values():
    config = config_from(
        {
            "model": "m",
            "max_model_len": 512,
            "kv_cache_memory_bytes": "1M",
            "served_model_name": "one",
            "distributed_executor_backend": "some.module:Executor",
        }
    )
    assert (
        config.model.max_model_len == "512"
        and config.cache.kv_cache_memory_bytes == 2**20
        and config.server.served_model_name == ["one"]
    )
    for wrong, message in [
        ({"max_num_seqs": True}, "max_num_seqs: expected a whole number"),
        ({"max_seqs": 3}, "did you mean max_num_seqs?"),
        ({"enforce_eager": 1}, "expected true or false"),
    ]:
        with pytest.raises(ValueError, match=message.replace("?", "\\?")):
            config_from(wrong)


@pytest.mark.parametrize(
    "text, number",
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5g", 1_500_000_000),
        ("0.5G", 2**29),
        ("4GiB", 2**32),
        ("4 G", 2**32),
        (17, 17),
    ],
)
def test_counts(text, number):
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "G", "-1", "1e3", "1.5", "4GB", "4giB", "1.0000001K", "0x10", "1_000", None])
def test_wrong_counts(text):
    with pytest.raises(ValueError):
        parse_count(text)


@given(st.integers(0, 10**15))
def test_plain_counts_are_themselves(number):
    assert parse_count(str(number)) == number


def test_importing_the_command_line_is_light():
    code = "import sys, quire.cli.main; print(*sorted(m.partition('.')[0] for m in sys.modules))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {
        "torch",
        "transformers",
        "yaml",
        "msgspec",
        "zmq",
        "fastapi",
        "pydantic",
        "tokenizers",
        "asyncio",
        "numpy",
        "tqdm",
        "server",
        "engine",
        "worker",
    }


@pytest.mark.slow
def test_collect_env_reports_this_machine():
    lines = dict(collect_env.report())
    assert lines["Python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert lines["msgspec"] == msgspec.__version__
    assert "threads:" in lines["torch sees"] and "GiB" in lines["memory"]
    assert collect_env.run(["no-such-program-here"]) == "no-such-program-here not found"


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["serve --print-config", "serve --help-all"])
def test_a_reader_that_has_seen_enough_is_no_error(command, unbuffered):
    script = f"set -o pipefail; {sys.executable} -m quire {command} | (read line; exec 0<&-; sleep 1)"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(
        ["bash", "-c", script], cwd=PRESETS.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("flag", ["--allowed-media-domains", "--allow-media-domains", "--allow_media_domains"])
def test_a_setting_with_two_names(served, tmp_path, monkeypatch, flag):
    assert served("m", flag, "a.example", "b.example")[0].media.allowed_media_domains == ["a.example", "b.example"]
    (tmp_path / "f.yaml").write_text("allow-media-domains: [c.example]")
    assert served("m", "--config", str(tmp_path / "f.yaml"))[0].media.allowed_media_domains == ["c.example"]
    monkeypatch.setenv("QUIRE_ALLOW_MEDIA_DOMAINS", "d.example")
    assert served("m")[0].media.allowed_media_domains == ["d.example"]
    assert config_from({"model": "m", "allow_media_domains": ["e"]}).media.allowed_media_domains == ["e"]


@pytest.mark.parametrize(
    "text", ["image=4,video=0", " image = 4 , video=0", '{"image": 4, "video": 0}', {"image": 4, "video": 0}]
)
def test_mappings(served, tmp_path, text):
    wanted = '{"image": 4, "video": 0}'
    if isinstance(text, str):
        assert served("m", "--limit-mm-per-prompt", text)[0].media.limit_mm_per_prompt == wanted
    (tmp_path / "f.yaml").write_text(yaml.safe_dump({"limit_mm_per_prompt": text}))
    assert served("m", "--config", str(tmp_path / "f.yaml"))[0].media.limit_mm_per_prompt == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"video": -1}', "video is -1, but must be a whole number of at least 0"),
        ("audio=2", "audio is 2, but must be 0: prompts may contain images and videos only"),
        ('{"audio": {}}', "audio is 1, but must be 0"),
        ('{"image": 2, "vidoe": 0}', 'unknown modality "vidoe"; the modalities are image, video, audio'),
        ('{"Image": 2}', 'unknown modality "Image"'),
        ('{"image": {"count": 2, "size": 5}}', "image: unknown key size; the keys are count, width"),
        ('{"image": -1}', "image is -1, but must be a whole number of at least 0"),
        ('{"image": true}', "image is true, but"),
        ('{"image": {"count": "2"}}', 'image is "2", but'),
    ],
)
def test_limits_of_media_that_cannot_be_kept_are_refused_at_once(refused, tmp_path, text, words):
    assert f"--limit-mm-per-prompt: {words}" in refused("m", "--limit-mm-per-prompt", text)
    (tmp_path / "f.yaml").write_text(yaml.safe_dump({"limit_mm_per_prompt": text}))
    assert f"f.yaml: {words}" in refused("m", "--config", str(tmp_path / "f.yaml"))


def test_unknown_keys_of_every_json_setting_are_refused(refused):
    """Except options of a model's image processor, which only the model's files tell; see tests/server/media."""
    mappings = {option.name for option in all_options().values() if option.unit == "mapping"}
    assert mappings > {"limit_mm_per_prompt", "mm_processor_kwargs"}
    for name in mappings - {"mm_processor_kwargs"}:
        flag = "--" + name.replace("_", "-")
        assert re.search(rf"{flag}: unknown \w+ .?nonsense", refused("m", flag, '{"nonsense": 1}')), name


@pytest.mark.parametrize("text", ["4", "image", "image=", "=4", "{image: 4}", "[1]", '{"image": 4'])
def test_wrong_mappings(refused, text):
    assert "--limit-mm-per-prompt: expected name=value, or a JSON object" in refused("m", "--limit-mm-per-prompt", text)


def test_a_folder_that_cannot_be_written_is_an_error_without_a_traceback(monkeypatch, capsys):
    def pull(argv):
        raise PermissionError(13, "Permission denied", "/.cache")

    monkeypatch.setitem(cli.COMMANDS, "pull", pull)
    assert cli.main(["pull", "smollm2"]) == 1
    assert capsys.readouterr().err == "quire pull: error: [Errno 13] Permission denied: '/.cache'\n"
