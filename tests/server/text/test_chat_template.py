"""Chat templates against transformers' apply_chat_template."""

import json
import sys
import time
import tracemalloc

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.text import chat_template
from quire.server.text.chat_template import MAX_SECONDS, compile_template
from quire.server.text.tokenizer import Tokenizer
from tests.helpers.server.family_templates import FAMILY_TEMPLATES
from tests.helpers.server.templates import (
    CHATML,
    GEMMA3_PARTS,
    LLAMA2,
    LLAMA3,
    MISTRAL,
    PARTS_ONLY,
    QWEN3,
    QWEN25,
    RAG,
    TEMPLATES,
)
from tests.helpers.server.tokenizer_kinds import KINDS, llama2

transformers = pytest.importorskip("transformers")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Wetter <&> "heute"',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "number"]}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "a1b2c3d4e",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 3}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "weather", "content": "4 °C"}
CONVERSATIONS = {
    "user": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": " Be <brief> & kind. "}, {"role": "user", "content": "Hi "}],
    "turns": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n 2 "},
        {"role": "user", "content": "3\n"},
    ],
    "answered": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "The answer is "}],
    "tool call": [
        {"role": "user", "content": "weather?"},
        CALL,
        RESULT,
        {"role": "assistant", "content": "cold"},
        {"role": "user", "content": "so?"},
    ],
    "reasoning": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", "reasoning_content": "\nbecause\n"},
    ],
    "wrong order": [{"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"}],
    "two systems": [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "system", "content": "c"},
        {"role": "user", "content": ""},
    ],
}
contents = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", " ", "\n", "{{ x }}", "{% raw %}", "<|im_end|>", "</think>", "a\n\nb ", "'\"\\", "é🦊"]),
)
conversations = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": contents}),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = llama2(tmp_path_factory.mktemp("m") / "m")
    return Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(str(folder))


def outcome(function, *errors):
    try:
        return function()
    except errors as error:
        return type(error)


def _with_text_arguments(message):
    calls = [
        call
        | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
    ]
    return message | {"tool_calls": calls} if calls else message


def check_equal(pair, source, messages, **options):
    """Both render the same text, or both refuse."""
    ours, reference = pair
    fields = {
        name: value
        for name, value in options.items()
        if name in ("tools", "documents", "add_generation_prompt", "continue_final_message")
    }
    variables = {name: value for name, value in options.items() if name not in fields}
    got = outcome(lambda: ours.render_chat(messages, chat_template=source, variables=variables, **fields), ValueError)
    if not compile_template(source).tool_support.arguments_as_object:
        messages = [_with_text_arguments(message) for message in messages]  # as a user of transformers has to pass them
    if compile_template(source).tool_support.no_content == "empty":
        messages = [{**message, "content": message["content"] or ""} for message in messages]
    expected = outcome(
        lambda: reference.apply_chat_template(messages, chat_template=source, tokenize=False, **options),
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        jinja2.TemplateError,
    )
    assert (got is ValueError) == isinstance(expected, type), (got, expected)
    if got is not ValueError:
        assert got == expected


@pytest.mark.parametrize("name", TEMPLATES)
class TestEveryTemplate:
    @pytest.mark.slow
    @pytest.mark.parametrize("conversation", CONVERSATIONS)
    def test_conversations(self, pair, name, conversation):
        if name == "PARTS_ONLY":
            pytest.skip("transformers prints nothing of a text here; see TestContent")
        for options in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"add_generation_prompt": False, "continue_final_message": True},
            {"tools": TOOLS, "add_generation_prompt": True},
            {
                "documents": [{"title": "T", "text": "é <b>"}],
                "enable_thinking": False,
                "date_string": "1 Jan 2025",
                "unknown_kwarg": {"ä": 1},
            },
        ):
            check_equal(
                pair, TEMPLATES[name], CONVERSATIONS[conversation], **{"add_generation_prompt": False, **options}
            )

    @pytest.mark.slow
    @settings(max_examples=25, deadline=None)
    @given(
        messages=conversations,
        options=st.fixed_dictionaries({}, optional={"tools": st.just(TOOLS), "enable_thinking": st.booleans()}),
        mode=st.sampled_from(
            [
                {"add_generation_prompt": True},
                {"add_generation_prompt": False},
                {"add_generation_prompt": False, "continue_final_message": True},
            ]
        ),
    )
    def test_random_messages(self, pair, name, messages, options, mode):
        if name != "PARTS_ONLY":
            check_equal(pair, TEMPLATES[name], messages, **options, **mode)


class TestContent:
    PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]

    def test_what_a_template_takes(self):
        expected = {
            "GEMMA3_PARTS": (True, True),
            "MISTRAL_IDS": (True, True),
            "MINIMAX_M2": (True, True),
            "PARTS_ONLY": (False, True),
        }
        for name, source in TEMPLATES.items():
            template = compile_template(source)
            assert (template.accepts_text, template.accepts_parts) == expected.get(name, (True, False)), name
            assert template.content_format == ("openai" if name in expected else "string")

    def test_parts_are_passed_to_templates_that_take_them(self, pair):
        messages = [{"role": "user", "content": self.PARTS}]
        for source in (GEMMA3_PARTS, PARTS_ONLY):
            check_equal(pair, source, messages, add_generation_prompt=True)
        assert "one two" in pair[0].render_chat(messages, chat_template=PARTS_ONLY)

    def test_parts_become_text_for_the_others(self, pair):
        assert "one \ntwo" in pair[0].render_chat([{"role": "user", "content": self.PARTS}], chat_template=CHATML)
        assert "one \ntwo" in pair[0].render_chat([{"role": "user", "content": ["one ", "two"]}], chat_template=QWEN3)

    def test_text_becomes_a_part_where_only_parts_are_taken(self, pair):
        assert (
            pair[0].render_chat([{"role": "user", "content": "hello"}], chat_template=PARTS_ONLY)
            == "User: hello<end_of_utterance>\nAssistant:"
        )

    def test_continued_parts(self, pair):
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": self.PARTS}]
        check_equal(pair, GEMMA3_PARTS, messages, add_generation_prompt=False, continue_final_message=True)
        assert messages[1]["content"] == self.PARTS  # the caller's messages are not modified

    @pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, 3])
    def test_other_parts_are_refused(self, pair, part):
        with pytest.raises(ValueError, match="only text parts"):
            pair[0].render_chat([{"role": "user", "content": [part]}], chat_template=CHATML)


class TestErrors:
    def refuse(self, pair, source, messages=({"role": "user", "content": "x"},), **options):
        with pytest.raises(ValueError) as error:
            pair[0].render_chat(list(messages), chat_template=source, **options)
        return str(error.value)

    def test_messages(self, pair):
        assert "must alternate" in self.refuse(pair, MISTRAL, CONVERSATIONS["wrong order"])
        assert "must alternate" in self.refuse(pair, LLAMA2, CONVERSATIONS["wrong order"])
        assert "single tool-calls" in self.refuse(
            pair, LLAMA3, [{"role": "assistant", "content": "", "tool_calls": []}]
        )
        assert "TypeError" in self.refuse(pair, CHATML, [{"role": "user", "content": 3}])
        assert "missing" in self.refuse(pair, "{{ absent.attribute }}")
        assert "line 2" in self.refuse(pair, "ok\n{% for %}")
        assert "empty" in self.refuse(pair, CHATML, [])

    def test_a_mistake_in_a_template_quotes_its_line(self, pair):
        for source, line in (
            ("a\n{{ messages[0].content + 3 }}", "(line 2: {{ messages[0].content + 3 }})"),
            ("{% macro f(x) %}\n\n  {{ x.y.z }}\n{% endmacro %}\n{{ f(3) }}", "(line 3: {{ x.y.z }})"),
        ):
            assert line in self.refuse(pair, source)

    def test_sandbox(self, pair):
        for source in (
            "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
            "{{ namespace(_a=1)._a }}",
            "{% set n = namespace() %}{% set n._a = 1 %}",
            "{{ dict.__init__.__globals__ }}",
        ):
            assert "refuses" in self.refuse(pair, source) or "missing" in self.refuse(pair, source)

    def test_variables_that_have_a_field(self, pair):
        with pytest.raises(ValueError, match="messages cannot be a template variable"):
            compile_template(CHATML).render([{"role": "user", "content": "x"}], variables={"messages": []})

    def test_a_variable_may_have_any_name(self, pair):
        names = [
            "self",
            "variables",
            "limited",
            "max_chars",
            "environment",
            "context",
            "loop",
            "args",
            "kwargs",
            "",
            "a b",
            "1",
        ]
        for name in names:
            assert (
                pair[0].render_chat(
                    CONVERSATIONS["user"], chat_template="x{{ mood }}", variables={name: 1, "mood": "!"}
                )
                == "x!"
            )

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "source",
        [
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            (
                "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ "
                "twice(90) }}"
            ),
            (
                "{{ range(99999) | map('string') | sum(start='') }}{% for a in range(99999) %}{{ range(99999) | "
                "map('string') | list | length }}{% endfor %}"
            ),
            "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
            "{{ 'a' * 10 ** 10 }}",
            "{{ (10 ** 10) * 'a' }}",
            "{{ 10 ** (10 ** 10) }}",
            "{% set x = 'a' * 10 ** 7 %}{{ x }}{{ x }}",
            "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
            "{% if 1 %}" * 500 + "{% endif %}" * 500,
        ],
    )
    def test_a_strangers_template_ends_soon(self, pair, source):
        started = time.thread_time()
        self.refuse(pair, source)
        assert time.thread_time() - started < 5 * MAX_SECONDS
        assert sys.gettrace() is None or "coverage" in sys.modules

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "source",
        [
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
            "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
            "{% for a in range(99999) if range(99999) | map('string') | list %}{% endfor %}",
        ],
    )
    def test_the_models_own_template_ends_too(self, monkeypatch, source):
        monkeypatch.setattr(chat_template, "MAX_OWN_SECONDS", 0.3)
        monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)  # of probes
        template = compile_template(source + "{# own #}")
        started = time.thread_time()
        with pytest.raises(ValueError, match=r"computes for more than 0\.3 seconds|RecursionError"):
            template.render([{"role": "user", "content": "x"}])
        assert time.thread_time() - started < 3

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "expression",
        [
            "'x'.ljust(N)",
            "'x'.rjust(N)",
            "'x'.center(width)",
            "'1'.zfill(N)",
            "'\\t\\t'.expandtabs(N)",
            "'x'.encode().ljust(N)",
            "(1).to_bytes(N, 'big')",
            "'{:>N}'.format(1)",
            "'{:>{w}}'.format(1, w=N)",
            "'{a:0N}'.format_map({'a': 1})",
            "('{:N}'|safe).format('x')",
            "'%Nd' % 1",
            "'%*d' % (N, 1)",
            "'%.Nf' % 1",
            "'%Ns'|format('x')",
            "'x'|center(N)",
            "'x'|center(width=N)",
            "'x'|indent(N)",
            "['x']|batch(N, 'y')|list",
            "['x']|slice(N)|list",
            "1.5|round(N, 'ceil')",
            "{'a': 1}|tojson(indent=N)",
            "{'a': 1}|tojson(separators=(t, t))",
            "t.replace('a', t)",
            "t|replace('a', t)",
            "t.join(t)",
            "([t] * 99999)|join",
            "([t] * 99999)|map('string')|join",
            "t.translate({97: t})",
            "t|wordwrap(1, wrapstring=t)",
            "[1] * N",
            "'a'.encode() * N",
            "(2 ** 60000) * (2 ** 60000)",
            "lipsum(n=N)",
        ],
    )
    def test_no_value_gets_large(self, monkeypatch, expression):
        monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)  # of probes
        source = "{% set t = 'a' * 99999 %}{{ (" + expression.replace("N", "1000000000") + ")|length }}"
        template = compile_template("{% set width = 1000000000 %}" + source)
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match="chat template"):
                template.render([{"role": "user", "content": "x"}])
            assert tracemalloc.get_traced_memory()[1] < 2**25
        finally:
            tracemalloc.stop()

    def test_texts_do_not_grow_by_doubling(self):
        for grow in ("n.s ~ n.s", "n.s + n.s"):
            source = "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = GROW %}{% endfor %}"
            with pytest.raises(ValueError, match="refuses"):
                compile_template(source.replace("GROW", grow)).render([{"role": "user", "content": "x"}])

    def test_usual_widths_are_taken(self):
        source = (
            "{{ 'a'.ljust(3) }}|{{ '%5.1f' % 2 }}|{{ '{:>4}'.format('b') }}|{{ 'a b'|replace(' ', '--') }}|"
            "{{ ['a', 'b']|join(', ') }}|{{ 'x'|center(5) }}|{{ 'a\\nb'|indent(2) }}|{{ [1, 2]|map('string')|join }}|"
            "{{ 7 ~ 'a' ~ none }}|{{ {'a': [1]}|tojson(indent=4) }}|{{ '%s-%d' % ('a', 3) }}|{{ 2.345|round(2) }}"
        )
        expected = jinja2.Environment().from_string(source.replace("|tojson(indent=4)", "['a']")).render()
        found = compile_template(source).render([{"role": "user", "content": "x"}])
        assert found == expected.replace("[1]", '{\n    "a": [\n        1\n    ]\n}')

    def test_the_models_own_template_may_write_more(self, tmp_path):
        tokenizer = Tokenizer.load(
            KINDS["llama3"](tmp_path / "m"), chat_template="{% set x = 'a' * 10 ** 7 %}{{ x }}{{ x }}"
        )
        assert len(tokenizer.render_chat(CONVERSATIONS["user"])) == 2 * 10**7

    def test_continue_final_message(self, pair):
        options = {"continue_final_message": True, "add_generation_prompt": False}
        assert "no content" in self.refuse(pair, CHATML, [{"role": "assistant"}], **options)
        assert "no text" in self.refuse(pair, GEMMA3_PARTS, [{"role": "assistant", "content": []}], **options)
        assert "as it is" in self.refuse(pair, "{{ messages[0].content | upper }}", **options)
        assert "does not print" in self.refuse(pair, "{{ messages[0].role }}", **options)
        assert "cannot both" in self.refuse(pair, CHATML, continue_final_message=True)


def test_special_tokens_and_further_variables(pair):
    check_equal(
        pair,
        "{{ bos_token }}{{ eos_token }}{{ unk_token }}|{{ pad_token }}|{{ x }}",
        CONVERSATIONS["user"],
        add_generation_prompt=False,
        x=[1, None],
    )
    check_equal(pair, "{{ bos_token }}", CONVERSATIONS["user"], add_generation_prompt=False, bos_token="mine")
    assert "none" in pair[0].render_chat(CONVERSATIONS["user"], chat_template=RAG)


class TestForms:
    """Forms of tool calls that differ between templates are found without being told."""

    CONVERSATION = [CONVERSATIONS["user"][0], CALL | {"tool_calls": [CALL["tool_calls"][0] | {"id": "call_1"}]}]
    LOOP = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}BODY{% endfor %}{% else %}" \
           "{{ m.content }}{% endif %}{% endfor %}"  # fmt: skip

    def render(self, body, arguments):
        (user, call) = self.CONVERSATION
        function = {"name": "weather", "arguments": arguments}
        call = call | {"tool_calls": [call["tool_calls"][0] | {"function": function}]}
        return compile_template(self.LOOP.replace("BODY", body)).render([user, call])

    @pytest.mark.parametrize("arguments", ['{"city": "Zürich"}', {"city": "Zürich"}])
    @pytest.mark.parametrize(
        "body",
        [
            "{{ c.function.arguments | tojson }}",
            "{{ '' + c.function.arguments }}",
            "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
        ],
    )
    def test_arguments_as_object_or_text(self, body, arguments):
        assert '{"city": "Zürich"}' in self.render(body, arguments)

    def test_arguments_that_are_no_object_stay_as_they_are(self):
        assert '{\\"city' in self.render("{{ c.function.arguments | tojson }}", '{"city')
        assert "{}" in self.render("{{ c.function.arguments | tojson }}", "")

    def test_ids_of_nine_characters(self):
        body = (
            "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
            "{{ c.id }}:{{ c.function.arguments | tojson }}"
        )
        text = self.render(body, {})
        assert text == self.render(body, {}) and "call_1" not in text

    @pytest.mark.parametrize("body", ["{{ m.content + 'x' }}", "{% if m.content is none %}y{% endif %}"])
    def test_content_that_is_missing(self, body):
        assert '{"city"' in self.render(body + "{{ c.function.arguments | tojson }}", {"city": "Zürich"})

    @pytest.mark.slow
    def test_support(self):
        expected = {"LLAMA3", "MISTRAL", "QWEN25", "HERMES", "QWEN3_TOOLS", *FAMILY_TEMPLATES}
        assert {name for name, source in TEMPLATES.items() if compile_template(source).tool_support.tools} == expected
        assert compile_template(QWEN25).tool_support.calls and not compile_template(CHATML).tool_support.calls


def test_a_template_is_compiled_once(pair):
    assert compile_template(CHATML) is compile_template(str(CHATML))
