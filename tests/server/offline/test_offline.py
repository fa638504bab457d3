"""`LLM`: the whole engine in its own process, from a script.

Most tests use the fake executor, whose tokens are known; one uses a real model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.configs import sources
from quire.engine.messages import SamplingParams as EngineParams
from quire.server.engines.supervisor import Supervisor
from quire.server.offline.llm import LLM, offline_config
from quire.server.offline.params import SamplingParams
from tests.helpers.engine.fake_executor import BACKEND, expected_tokens
from tests.helpers.models.checkpoints import greedy, load_reference
from tests.helpers.server.light_model import VOCAB_SIZE, write_light_model

MAX_LEN = 64
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_light_model(tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, distributed_executor_backend=BACKEND, max_model_len=MAX_LEN) as llm:
        yield llm


def fake_outputs(prompt: list[int], **sampling) -> list[int]:
    return expected_tokens(prompt, EngineParams(**sampling), MAX_LEN, VOCAB_SIZE)


def test_every_form_of_prompt(llm):
    ids = llm.tokenizer.encode("Hello, world!")
    for prompts in [
        "Hello, world!",
        ["Hello, world!"],
        ids,
        [ids],
        {"prompt": "Hello, world!"},
        {"prompt_token_ids": ids, "cache_salt": "mine"},
        [{"prompt_token_ids": tuple(ids)}],
    ]:
        (output,) = llm.generate(prompts, SamplingParams(seed=3, max_tokens=5, ignore_eos=True), use_tqdm=False)
        assert output.prompt_token_ids == ids and output.prompt == (
            "Hello, world!"
            if "Hello, world!" in (prompts, prompts[0] if isinstance(prompts, list) else None)
            or (isinstance(prompts, dict) and "prompt" in prompts)
            else None
        )
        (answer,) = output.outputs
        assert answer.token_ids == fake_outputs(ids, seed=3, max_tokens=5)
        assert (answer.finish_reason, answer.stop_reason, answer.logprobs, output.prompt_logprobs, output.finished) == (
            "length",
            None,
            None,
            None,
            True,
        )
        assert answer.text == llm.tokenizer.decode(answer.token_ids)


def test_outputs_keep_the_order_of_prompts_and_params(llm):
    prompts = [[i, i + 1, i + 2] for i in range(10, 60)]
    params = [SamplingParams(seed=i, max_tokens=1 + i % 20, ignore_eos=True) for i in range(50)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [
        fake_outputs(prompt, seed=i, max_tokens=1 + i % 20) for i, prompt in enumerate(prompts)
    ]
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert len({output.request_id for output in outputs}) == 50


def test_choices_without_sampling_are_equal(llm):
    params = SamplingParams(n=3, temperature=0, seed=3, max_tokens=8, ignore_eos=True, logprobs=1)
    for output in llm.generate([[5, 6, 7], [8]], params, use_tqdm=False):
        assert [one.index for one in output.outputs] == [0, 1, 2]
        ids = fake_outputs(output.prompt_token_ids, seed=3, max_tokens=8)
        assert all(one.token_ids == ids and one.logprobs == output.outputs[0].logprobs for one in output.outputs)


def test_n_choices_and_logprobs(llm):
    (output,) = llm.generate(
        [[5, 6, 7]],
        SamplingParams(n=3, seed=1, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        use_tqdm=False,
    )
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert [answer.token_ids for answer in output.outputs] == [
        fake_outputs([5, 6, 7], seed=1 + i, max_tokens=4) for i in range(3)
    ]
    for answer in output.outputs:
        assert len(answer.logprobs) == len(answer.token_ids) == 4
        for token_id, entry in zip(answer.token_ids, answer.logprobs):
            assert (
                entry[token_id].logprob == -0.5
                and entry[token_id].rank == 1
                and entry[token_id].decoded_token == llm.tokenizer.id_to_token(token_id)
            )
            assert len(entry) >= 2
    assert output.prompt_logprobs[0] is None and [next(iter(entry)) for entry in output.prompt_logprobs[1:]] == [6, 7]


def test_stop_strings_and_stop_tokens(llm):
    (whole,) = llm.generate([[9, 9]], SamplingParams(seed=5, max_tokens=40, ignore_eos=True), use_tqdm=False)
    text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
    stop = text[20:23]
    (output,) = llm.generate(
        [[9, 9]], SamplingParams(seed=5, max_tokens=40, ignore_eos=True, stop=[stop]), use_tqdm=False
    )
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
        text[: text.index(stop)],
        "stop",
        stop,
    )
    (output,) = llm.generate(
        [[9, 9]], SamplingParams(seed=5, max_tokens=40, ignore_eos=True, stop_token_ids=[ids[6]]), use_tqdm=False
    )
    assert output.outputs[0].stop_reason == ids[6] and output.outputs[0].token_ids == ids[: ids.index(ids[6]) + 1]


def test_no_limit_is_what_the_context_holds_and_none_is_the_default(llm):
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=None, seed=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == MAX_LEN - 3
    (output,) = llm.generate([[1, 2, 3]], use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16


def test_chat_renders_the_template(llm):
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = llm.tokenizer.render_chat(conversation)
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert output.prompt == text and output.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    first, second = llm.chat(
        [conversation, conversation[1:]], GREEDY, use_tqdm=False, chat_template="{{ messages[-1]['content'] }}!"
    )
    assert first.prompt == second.prompt == "Hi!"
    (output,) = llm.chat(
        [*conversation, {"role": "assistant", "content": "Well,"}],
        GREEDY,
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert output.prompt.endswith("Well,")


def test_chat_with_tools(llm):
    hi, tool = [{"role": "user", "content": "Hi"}], {"type": "function", "function": {"name": "weather"}}
    template = "{{ tools[0].function.name if tools }}: {{ messages[-1].content }}"
    (output,) = llm.chat(hi, GREEDY, use_tqdm=False, chat_template=template, tools=[tool])
    assert output.prompt == "weather: Hi"
    with pytest.raises(ValueError, match="maximum context length is 64 tokens"):  # of the generic tool prompt
        llm.chat(hi, GREEDY, use_tqdm=False, tools=[tool])
    with pytest.raises(ValueError, match=r"tools.0.function.name"):
        llm.chat(hi, GREEDY, tools=[{"type": "function", "function": {"name": 3}}])


def test_progress_bar(llm, capsys):
    llm.generate([[1, 2], [3, 4]], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts" in shown and "2/2" in shown and "toks/s" in shown
    llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature: must be a finite number"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n: "),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"stop": ""}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {1: 1e7}}, "logit_bias"),
        ({"seed": 2**70}, "seed"),
        ({"bad_words": "x"}, "bad_words"),
    ],
)
def test_wrong_params_are_named_when_made(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    "prompts, params, message",
    [
        (["ok", ""], GREEDY, "prompt must not be empty"),
        ([list(range(1, MAX_LEN + 2))], GREEDY, "maximum context length is 64"),
        ([[VOCAB_SIZE]], GREEDY, "token ids must be between 0 and"),
        ([[1]], [GREEDY, GREEDY], "2 for 1 prompts"),
        ([[1]], SamplingParams(max_tokens=65), "max_tokens is too large"),
        ([[1]], SamplingParams(logprobs=21), "limit of 20"),
        ([[1]], SamplingParams(min_tokens=9, max_tokens=8), "min_tokens"),
        ([{"prompt": "a", "prompt_token_ids": [1]}], GREEDY, "exactly one"),
        ([{"text": "a"}], GREEDY, "unknown key 'text'"),
        ([[1]], SamplingParams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
    ],
)
def test_wrong_requests_are_refused_before_anything_runs(llm, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm._runtime.state.client.num_open == 0


def test_wrong_messages_are_named(llm):
    with pytest.raises(ValueError, match=r"messages.0.role"):
        llm.chat([{"role": "robot", "content": "x"}], GREEDY)
    with pytest.raises(ValueError, match=r"messages.1.content: expected"):
        llm.chat([{"role": "user", "content": "x"}, {"role": "user", "content": 3}], GREEDY)
    with pytest.raises(ValueError, match=r"messages.0.tool_calls.0.function"):
        llm.chat([{"role": "assistant", "content": "x", "tool_calls": [{}]}], GREEDY)
    with pytest.raises(ValueError, match=r"messages.0.content.0.image_uri is not supported"):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "x", "image_uri": "y"}]}], GREEDY)
    with pytest.raises(ValueError, match="must not be empty"):
        llm.chat([], GREEDY)
    with pytest.raises(ValueError, match="chat template is not valid"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, chat_template="{% if %}")


def test_settings_are_checked():
    for wrong, message in [
        ({"port": 3}, "port is a setting of the HTTP server"),
        ({"max_num_sqs": 3}, "did you mean max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            offline_config("m", wrong)
    with pytest.raises(ValueError, match="there is no folder /nowhere"):
        LLM("/nowhere")


def test_without_a_model_it_is_the_embedded_one(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "EMBEDDED_MODEL", tmp_path)
    with pytest.raises(ValueError, match="no model comes with"):
        offline_config("", {})
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert offline_config("", {}).model.model == str(tmp_path)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.lists(st.integers(4, 400), min_size=1, max_size=30), st.integers(1, 30), st.integers(0, 9)),
        min_size=1,
        max_size=12,
    )
)
def test_any_batch_gives_what_each_prompt_gives_alone(llm, batch):
    outputs = llm.generate(
        [prompt for prompt, _, _ in batch],
        [SamplingParams(max_tokens=length, seed=seed, ignore_eos=True) for _, length, seed in batch],
        use_tqdm=False,
    )
    assert [output.outputs[0].token_ids for output in outputs] == [
        fake_outputs(prompt, max_tokens=length, seed=seed) for prompt, length, seed in batch
    ]


def test_several_threads_share_one_llm(llm):
    results: dict[int, list[int]] = {}

    def work(seed: int) -> None:
        results[seed] = (
            llm.generate([[4, 5]], SamplingParams(seed=seed, max_tokens=9, ignore_eos=True), use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {seed: fake_outputs([4, 5], seed=seed, max_tokens=9) for seed in range(6)}


@pytest.fixture(scope="module")
def slow_llm(folder):
    """One token takes 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_EXECUTOR", "step_delay=0.02")
        llm = LLM(folder, distributed_executor_backend=BACKEND, max_model_len=MAX_LEN)
    with llm:
        yield llm


def test_ctrl_c_aborts_the_requests_and_leaves_the_engine(slow_llm):
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        slow_llm.generate([[7, 8], [9]], SamplingParams(seed=4, max_tokens=50, ignore_eos=True), use_tqdm=False)
    (output,) = slow_llm.generate([[7, 8]], SamplingParams(seed=4, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == fake_outputs([7, 8], seed=4, max_tokens=3)
    assert slow_llm._runtime.state.client.num_open == 0


def test_a_new_engine_takes_over_when_one_dies(slow_llm):
    supervisor = slow_llm._runtime.supervisor
    first = supervisor.engine.pid
    threading.Timer(0.3, lambda: os.kill(first, signal.SIGKILL)).start()
    (output,) = slow_llm.generate([[7, 8]], SamplingParams(seed=4, max_tokens=40, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == fake_outputs([7, 8], seed=4, max_tokens=40)
    assert supervisor.engine.pid != first


def test_a_mistake_of_who_watches_over_the_engine_is_told(folder, monkeypatch):
    """The error is reported at startup, and to requests that would otherwise wait forever for the next engine."""

    def mistake(*_):
        raise TypeError("a mistake")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="the engine failed: a mistake"):
        patch.setattr(Supervisor, "_until_ready", mistake)
        LLM(folder, distributed_executor_backend=BACKEND)
    monkeypatch.setenv("FAKE_EXECUTOR", "step_delay=0.02")
    with LLM(folder, distributed_executor_backend=BACKEND, max_model_len=MAX_LEN) as llm:
        monkeypatch.setattr(llm._runtime.supervisor, "_check_restarts", mistake)
        threading.Timer(0.3, lambda: os.kill(llm._runtime.supervisor.engine.pid, signal.SIGKILL)).start()
        with pytest.raises(RuntimeError):
            llm.generate([[7, 8]], SamplingParams(seed=4, max_tokens=40, ignore_eos=True), use_tqdm=False)
        with pytest.raises(RuntimeError, match="a mistake"):
            llm.generate([[7, 8]], use_tqdm=False)


@pytest.mark.slow
def test_close_ends_the_engine(folder):
    llm = LLM(folder, distributed_executor_backend=BACKEND)
    engine = psutil.Process(llm._runtime.supervisor.engine.pid)
    llm.close()
    llm.close()
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")


@pytest.mark.slow
def test_a_script_without_a_main_guard(checkpoint, tmp_path):
    """Greedy tokens equal those of transformers; the engine ends with the script."""
    folder = checkpoint("qwen3")
    reference = load_reference(folder)
    prompt = [11, 12, 13, 14]
    tokens, _, margins = greedy(reference, prompt, 12)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        from quire import LLM, SamplingParams
        llm = LLM({folder!r}, dtype="float32", max_model_len=256, device="cpu",
                  kv_cache_memory_bytes="16M", num_threads=1)
        print(llm._runtime.supervisor.engine.pid)
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        print(llm.generate([{prompt}], sampling, use_tqdm=False)[0].outputs[0].token_ids)
    """)
    )
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    pid, generated = result.stdout.splitlines()
    assert min(margins) > 1e-3 and generated == str(tokens)
    end = time.monotonic() + 10
    while psutil.pid_exists(int(pid)):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_a_removed_setting_is_accepted_and_warned_of(folder, caplog):
    with LLM(folder, distributed_executor_backend=BACKEND, max_model_len=MAX_LEN, cache_reuse=16) as llm:
        assert llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].outputs
    (warning,) = [one for one in caplog.records if "--cache-reuse" in one.getMessage()]
    assert warning.levelname == "WARNING" and warning.getMessage().startswith("--cache-reuse 16: no effect")
