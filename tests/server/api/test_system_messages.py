"""System messages that are not the first: agents send them in the middle of a conversation, and many templates refuse
them (Qwen 3.5, Mistral) or leave them out (gpt-oss, Llama 2).
"""

from __future__ import annotations

import itertools

import pytest

from quire.server.prompt.system_messages import fit_system_messages
from quire.server.text.chat_template import compile_template
from tests.helpers.server import family_templates, templates
from tests.helpers.server.running import MODEL
from tests.helpers.server.scripted import scripted_server, write_folder

GUARDED = """\
{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}\
{{- raise_exception('System message must be at the beginning.') }}{%- endif %}\
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TEMPLATES = {
    name: text
    for module in (templates, family_templates)
    for name, text in vars(module).items()
    if name.isupper() and isinstance(text, str) and "{%" in text and name not in ("GEMMA", "LOOP_CONTROLS")
} | {"GUARDED": GUARDED}
SHAPES = ["su", "ssu", "us", "usu", "uasu", "suasu", "uas", "ssuassu", "usus"]
ROLES = {"s": "system", "u": "user", "a": "assistant", "d": "developer"}


def conversation(shape: str) -> list[dict[str, str]]:
    return [{"role": ROLES[letter], "content": f"qz{i}{letter}"} for i, letter in enumerate(shape)]


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_prints_every_message(name):
    template = compile_template(TEMPLATES[name])
    variables = {"bos_token": "", "eos_token": ""}
    for shape in SHAPES:
        messages = conversation(shape)
        text = template.render(fit_system_messages(messages, template), variables=variables)
        assert all(message["content"] in text for message in messages), (shape, text)


def test_what_a_template_prints_stays_as_it_is():
    template = compile_template(templates.CHATML)
    for shape in SHAPES:
        assert fit_system_messages(conversation(shape), template) == conversation(shape)


def test_the_prompt_of_a_turn_begins_that_of_the_next():
    template = compile_template(GUARDED)
    turns = conversation("suasusasu")
    ends = [i + 1 for i, message in enumerate(turns) if message["role"] == "assistant"]
    texts = [template.render(fit_system_messages(turns[:end], template), add_generation_prompt=False) for end in ends]
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before)
    assert "user\nqz3s\n\nqz4u\n\nqz5s<" in texts[1] and texts[0].count("system") == 1


def test_roles_of_templates_that_know_developers():
    """Which are those that leave out all but the first."""
    template = compile_template(family_templates.GPT_OSS)
    fitted = fit_system_messages(conversation("sduad"), template)
    assert [message["role"] for message in fitted] == ["system", "user", "assistant", "user"]
    assert fitted[0]["content"] == "qz0s\n\nqz1d"


def test_content_in_parts():
    template = compile_template(GUARDED)
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": "x"}]
    late = {"role": "system", "content": "late"}
    (fitted,) = fit_system_messages([{"role": "user", "content": parts}, late], template)
    assert [part.get("text") for part in fitted["content"]] == ["a", None, "\n\n", "late"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("guarded"), GUARDED)) as pair:
        yield pair


LATE = [
    {"role": "user", "content": "Hello"},
    {"role": "system", "content": "Agents: none."},
]


@pytest.mark.parametrize(
    "path,body",
    [
        ("/v1/chat/completions", {"messages": LATE}),
        ("/v1/chat/completions", {"messages": [LATE[0], {"role": "developer", "content": "Agents: none."}]}),
        ("/v1/messages", {"messages": LATE, "max_tokens": 9, "system": "Be brief."}),
        ("/v1/messages", {"messages": [LATE[0], LATE[1] | {"content": [{"type": "text", "text": "Agents: none."}]}],
                          "max_tokens": 9}),
        ("/v1/responses", {"input": LATE, "instructions": "Be brief."}),
        ("/api/chat", {"messages": LATE, "stream": False}),
    ],
)  # fmt: skip
def test_every_dialect(guarded, path, body):
    server, script = guarded
    script.says("ok")
    answer = server.http.post(path, json={"model": MODEL} | body)
    assert answer.status_code == 200, answer.text
    prompt = server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert "user\nHello\n\nAgents: none.<|im_end|>" in prompt
