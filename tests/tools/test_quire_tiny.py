"""The generator of quire-tiny's data, its tokenizer's rules and its chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jinja2.sandbox
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tools.quire_tiny import data, evaluate, facts, skills
from tools.quire_tiny.chat import render
from tools.quire_tiny.model import Shape, Trunk
from tools.quire_tiny.skill import held_out
from tools.quire_tiny.tokenizer import LETTERS, build, everyday_words, vocabulary_words, words_of
from tools.quire_tiny.tool_skills import draw_use, key_of, tool_conversation
from tools.quire_tiny.train import warm_start
from tools.quire_tiny.word_skills import Words

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "quire-tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(autouse=True)
def words(tokenizer, monkeypatch):
    monkeypatch.setattr(Words, "vocabulary", vocabulary_words(tokenizer))


def template():
    """chat_template.jinja in the environment that transformers gives it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((FOLDER / "chat_template.jinja").read_text())


def test_same_seed_same_conversations():
    first, second = ([data.conversation(random.Random(5), held=False) for _ in range(3)] for _ in range(2))
    assert first == second
    assert data.conversation(random.Random(6), held=False) != first[0]


@pytest.mark.parametrize("name", list(skills.SKILLS))
def test_each_skill_has_training_and_held_out_instances(name):
    rng = random.Random(1)
    train = {skills.draw(name, rng, held=False).key for _ in range(200)}
    held = {skills.draw(name, rng, held=True).key for _ in range(20)}
    assert not train & held


def test_reworded_questions_are_new_wordings_of_trained_ones():
    trained = {question for questions, _ in (*facts.IDENTITY, *facts.QUIRE, *facts.GENERAL) for question in questions}
    assert set(facts.REWORDED.values()) <= trained
    assert not set(facts.REWORDED) & trained


def test_held_out_number_pairs_never_occur_in_training_conversations():
    rng = random.Random(2)
    turns = [skills.draw("addition", rng, held=False) for _ in range(2000)]
    pairs = {(a, b) for a in range(100) for b in range(100) if held_out(f"add {a} {b}")}
    asked = {
        tuple(int(n) for n in t.assistant.split(" = ")[0].split(" + "))
        for turn in turns
        for t in (turn, *turn.follow_ups)
    }
    assert 500 < len(pairs) < 900
    assert not asked & pairs


@pytest.mark.parametrize("name", ["addition", "subtraction", "multiplication"])
def test_sums_are_right(name):
    rng = random.Random(3)
    for _ in range(300):
        question, answer = skills.SKILLS[name][1](rng).assistant.split(" = ")
        assert eval(question) == int(answer)


@pytest.mark.parametrize(
    ("name", "answer_of"),
    [("reversing", lambda word: word[::-1]), ("spelling", "-".join), ("casing", lambda word: word)],
)
def test_letters_are_right(name, answer_of):
    rng = random.Random(4)
    for _ in range(300):
        turn = skills.SKILLS[name][1](rng)
        if turn.key.startswith("wording "):
            words = turn.key.removeprefix("wording ").split(" ")
            assert len(words) == len(set(words)) >= 2
            assert turn.assistant.lower() == ", ".join(answer_of(word) for word in words).lower()
        elif turn.skill == name:
            word = turn.key.removeprefix("vocabulary ").removeprefix("word ").lower()
            assert turn.assistant.lower() == answer_of(word)


def test_lists_of_words_to_spell_have_no_held_out_word():
    rng = random.Random(4)
    for _ in range(200):
        for word in Words.draw_several(rng):
            assert word in Words.vocabulary or not held_out(f"word {word.lower()}")


def test_everyday_words_are_letters(tokenizer):
    assert {"banana", "tiger", "house", "blue", "happy"} <= everyday_words()
    assert not everyday_words() & {word.lower() for word in vocabulary_words(tokenizer)}


def test_json_answers_are_json_objects():
    rng = random.Random(5)
    for _ in range(300):
        assert isinstance(json.loads(skills.json_object(rng).assistant), dict)


def test_tool_calls_match_their_definition():
    rng = random.Random(6)
    for _ in range(400):
        use = draw_use(rng, held=False)
        schema = use.tool["function"]["parameters"]
        assert set(use.arguments) <= set(schema["properties"])
        assert set(schema["required"]) <= set(use.arguments)
        assert not held_out(key_of(use))


def test_the_called_tool_is_offered():
    rng = random.Random(7)
    for _ in range(400):
        _, messages, tools = tool_conversation(rng, held=False)
        names = [t["function"]["name"] for t in tools]
        called = [c["function"]["name"] for m in messages for c in m.get("tool_calls") or []]
        assert set(called) <= set(names)
        assert len(names) == len(set(names))


@pytest.mark.parametrize("held", [False, True])
def test_template_makes_the_text_that_was_trained(held):
    rng, chat = random.Random(8), template()
    for _ in range(150):
        example = data.conversation(rng, held, tool_share=0.5)
        trained = "".join(text for text, _ in render(example.messages, example.tools))
        assert (
            chat.render(messages=example.messages, tools=example.tools or None, add_generation_prompt=False) == trained
        )
        prompt = "".join(text for text, _ in render(example.messages[:-1], example.tools, add_generation_prompt=True))
        assert (
            chat.render(messages=example.messages[:-1], tools=example.tools or None, add_generation_prompt=True)
            == prompt
        )


def test_template_takes_what_clients_send():
    chat = template()
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]}]
    assert (
        chat.render(messages=parts, add_generation_prompt=True)
        == "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    )
    bare = [{"type": "function", "function": {"name": "now"}}]
    assert "<tools>\nnow()\n</tools>" in chat.render(messages=parts, tools=bare)
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {"zone": "é"}}}],
    }
    assert '{"name": "now", "arguments": {"zone": "é"}}' in chat.render(messages=[*parts, call])


def test_later_calls_of_a_conversation_are_answered_with_their_own_results():
    rng, longest = random.Random(10), 0
    for _ in range(300):
        _, messages, _ = tool_conversation(rng, held=False)
        calls = [c["id"] for m in messages for c in m.get("tool_calls") or []]
        results = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
        assert len(calls) == len(set(calls))
        assert results == calls[: len(results)]
        longest = max(longest, len(calls))
    assert longest >= 3


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in [
        "Hello, world!",
        "größer  und\n\n schöner\t",
        "你好 🙂",
        "12345 + 6",
        "get_weather(city)",
        "\x00\x7f",
        "<|im_start|>user",
    ]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_unknown_words_are_letters_and_numbers_are_digits(tokenizer):
    assert tokenizer.encode(" zyxgrk 407").tokens == ["Ġ", "z", "y", "x", "g", "r", "k", "Ġ", "4", "0", "7"]


def test_common_letters_beyond_ascii_are_one_token(tokenizer):
    tokenizer = build(words_of(tokenizer))
    assert all(len(tokenizer.encode(letter).ids) == 1 for letter in LETTERS)
    assert len(set(LETTERS)) == len(LETTERS)
    assert len(tokenizer.encode(" café größer “жук” – ελιά…").ids) == sum(
        map(len, [" café", " größer", " “жук”", " –", " ελιά…"])
    )
    assert len(tokenizer.encode("你🙂").ids) == len(
        "你🙂".encode()
    )  # characters outside the vocabulary are encoded as bytes


def test_a_new_vocabulary_can_keep_the_words_of_an_earlier_one(tokenizer):
    words = words_of(tokenizer)
    assert build(words).get_vocab().items() >= tokenizer.get_vocab().items()  # with the same ids
    shorter = build(words[:-100])
    assert len(words_of(shorter)) == len(words) - 100 and "Ġcapital" in shorter.get_vocab()


@pytest.mark.parametrize("name", ["accents", "scripts"])
def test_text_beyond_ascii_is_copied_as_it_is(tokenizer, name):
    rng = random.Random(12)
    turns = [skills.draw(name, rng, held=False) for _ in range(300)]
    assert sum(not turn.assistant.isascii() for turn in turns) > 250
    for turn in turns:
        if turn.key.startswith("repeat "):
            assert turn.assistant in turn.user
        for text in (turn.user, turn.assistant):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_names_of_tools_are_ascii_but_their_values_need_not_be():
    rng = random.Random(13)
    uses = [draw_use(rng, held=False) for _ in range(400)]
    assert all(use.tool["function"]["name"].isascii() for use in uses)
    assert any(not str(value).isascii() for use in uses for value in use.arguments.values())
    assert not any("\\u" in use.result for use in uses)


def test_a_warm_start_takes_the_rows_of_the_tokens_that_both_have(tokenizer):
    old = load_file(FOLDER / "model.safetensors")
    words = words_of(tokenizer)
    other = build([*words[::-1], "zyxgrk"])  # in another order, and one more
    trunk = Trunk(Shape(vocab_size=other.get_vocab_size()))
    warm_start(trunk, other, FOLDER)
    before, after, rows = old["model.embed_tokens.weight"].float(), trunk.embed_tokens.weight, other.get_vocab()
    for token in ("<|im_end|>", "a", "7", "Ġcapital", "temperature"):
        assert torch.equal(after[rows[token]], before[tokenizer.token_to_id(token)])
    letters = after[[rows[letter] for letter in "abcdefghijklmnopqrstuvwxyz"]]
    assert 0.5 < (after[rows["zyxgrk"]] - letters.mean(0)).norm() / (letters - letters.mean(0)).norm(dim=1).mean() < 2
    assert torch.equal(trunk.layers[2].mlp.up_proj.weight, old["model.layers.2.mlp.up_proj.weight"].float())


def test_special_tokens_and_markers(tokenizer):
    assert [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    ids = tokenizer.encode('<tool_call>\n{"name": "f"}\n</tool_call><|im_end|>').ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == '<tool_call>\n{"name": "f"}\n</tool_call>'


def test_batches_learn_the_assistants_tokens_only(tokenizer):
    batch = next(data.batches(tokenizer, random.Random(9), held=False))
    rows, columns = np.nonzero(batch.targets >= 0)
    assert (batch.targets[rows, columns] == batch.tokens[rows, columns + 1]).all()
    assert (batch.document[rows, columns] == batch.document[rows, columns + 1]).all()
    for number in range(len(batch.turn_skills)):
        where = np.nonzero(batch.turn == number)
        text = tokenizer.decode(batch.targets[where].tolist(), skip_special_tokens=False)
        assert text.endswith("<|im_end|>") and text.count("<|im_end|>") == 1
        before = batch.tokens[where[0][0], : where[1][0] + 1]
        assert tokenizer.decode(before.tolist(), skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def test_evaluation_asks_held_out_instances_and_accepts_only_the_expected_answer():
    cases = evaluate.build_cases(3, seed=1)
    assert cases == evaluate.build_cases(3, seed=1)
    for case in cases:
        calls = [call["function"] for call in case.expected.get("tool_calls") or []]
        written = [json.dumps({"name": call["name"], "arguments": json.loads(call["arguments"])}) for call in calls]
        text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written) or case.expected["content"]
        assert evaluate.is_right(case, text, evaluate.parse_calls(text))
        assert not evaluate.is_right(case, text[:-1], evaluate.parse_calls(text[:-1]))
    assert evaluate.parse_calls("<tool_call>{broken</tool_call>") is None
