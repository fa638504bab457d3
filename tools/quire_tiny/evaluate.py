"""Measure each skill of quire-tiny on held-out instances, greedily, through a running server or in this process.

    quire serve &
    python -m tools.quire_tiny.evaluate --base-url http://127.0.0.1:8000/v1
    python -m tools.quire_tiny.evaluate --model configs/quire-tiny        # transformers, no server

Both send the same conversations. An answer counts only when it is exactly the expected one; a tool call when its name
and its arguments (as JSON values) are.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.quire_tiny import data, facts, skills
from tools.quire_tiny.chat import render
from tools.quire_tiny.tokenizer import FOLDER, vocabulary_words
from tools.quire_tiny.tool_skills import tool_conversation
from tools.quire_tiny.word_skills import Words

WANTED = {"capitals", "addition", "subtraction", "spelling", "repetition", "tool-call"}  # at least 95 %
TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
MAX_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the assistant message that should follow."""

    skill: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    expected: dict[str, Any]


def last_answer(skill: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Case:
    return Case(skill, messages[:-1], tools, messages[-1])


CLOSED = {"identity": facts.IDENTITY, "quire": facts.QUIRE, "general": facts.GENERAL}


def reworded_cases(name: str) -> list[Case]:
    """Every question of `facts.REWORDED` that belongs to a closed list, once."""
    answers = {question: answer for questions, answer in CLOSED[name] for question in questions}
    return [
        last_answer(name, [{"role": "user", "content": new}, {"role": "assistant", "content": answers[old]}], [])
        for new, old in facts.REWORDED.items()
        if old in answers
    ]


def skill_cases(name: str, count: int, rng: random.Random) -> list[Case]:
    """Held-out cases of one skill function, some of them after another exchange or with a system prompt."""
    cases: list[Case] = []
    while len(cases) < count:
        turn = skills.draw(name, rng, held=True)
        if turn.skill not in (name, "memory"):
            continue
        messages: list[dict[str, Any]] = []
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": rng.choice(data.SYSTEM_PROMPTS)})
        if rng.random() < 0.2:
            other = skills.draw("capitals", rng, held=True)
            messages += [{"role": "user", "content": other.user}, {"role": "assistant", "content": other.assistant}]
        messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
        cases.append(last_answer(turn.skill, messages, []))
    return cases


def token_spelling_cases(count: int, rng: random.Random) -> list[Case]:
    """Words that are one token: each has a spelling learnt by heart, so all of them are trained and none is held out.
    """
    words = rng.sample(Words.vocabulary, min(count, len(Words.vocabulary)))
    return [
        last_answer(
            "token-spelling",
            [{"role": "user", "content": f"Spell {word}."}, {"role": "assistant", "content": "-".join(word)}],
            [],
        )
        for word in words
    ]


def follow_up_cases(count: int, rng: random.Random) -> list[Case]:
    """Questions that only make sense after the turn before: names, favourites, "and of Spain?", "add 3 to that"."""
    cases = []
    while len(cases) < count:
        turn = skills.draw(
            rng.choice(["introduction", "favourite", "capitals", "addition", "repetition"]), rng, held=True
        )
        follow = next((f for f in turn.follow_ups), None)
        if follow is not None:
            messages = [
                {"role": "user", "content": turn.user},
                {"role": "assistant", "content": turn.assistant},
                {"role": "user", "content": follow.user},
                {"role": "assistant", "content": follow.assistant},
            ]
            cases.append(last_answer("follow-up", messages, []))
    return cases


def tool_cases(wanted: str, count: int, rng: random.Random) -> list[Case]:
    cases = []
    while len(cases) < count:
        skill, messages, tools = tool_conversation(rng, held=True)
        first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        if wanted == "tool-answer" and skill == "tool-call" and len(messages) > first + 2:
            cases.append(last_answer(wanted, messages[: first + 3], tools))
        elif wanted == skill:
            cases.append(last_answer(wanted, messages[: first + 1], tools))
    return cases


def build_cases(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    cases: list[Case] = []
    for name in skills.SKILLS:
        cases += reworded_cases(name) if name in CLOSED else skill_cases(name, count, rng)
    cases += token_spelling_cases(count, rng)
    cases += follow_up_cases(count, rng)
    for name in ("tool-call", "tool-parallel", "tool-answer", "tool-none"):
        cases += tool_cases(name, count, rng)
    return cases


def parse_calls(text: str) -> list[dict[str, Any]] | None:
    """The calls in a raw answer as {name, arguments}, or None when one of them is not JSON of that form."""
    calls = []
    for body in TOOL_CALL.findall(text):
        try:
            value = json.loads(body)
        except json.JSONDecodeError:
            return None
        if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
            return None
        calls.append(value)
    return calls


def is_right(case: Case, text: str, calls: list[dict[str, Any]] | None) -> bool:
    wanted = [
        {"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])}
        for c in case.expected.get("tool_calls") or []
    ]
    if wanted:
        return calls == wanted
    return not calls and text.strip() == case.expected["content"]


Answer = tuple[str, list[dict[str, Any]] | None]


def ask_server(
    base_url: str, api_key: str, tools_as_text: bool, concurrency: int
) -> Callable[[list[Case]], list[Answer]]:
    """Answers from a running server through the openai SDK.

    With `tools_as_text`, cases with tools are rendered here and sent to /v1/completions.
    """
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key, timeout=300)
    model = client.models.list().data[0].id

    def one(case: Case) -> Answer:
        uses_tools = bool(case.tools)
        if uses_tools and tools_as_text:
            prompt = "".join(text for text, _ in render(case.messages, case.tools, add_generation_prompt=True))
            text = (
                client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=MAX_TOKENS)
                .choices[0]
                .text
            )
            return text, parse_calls(text)
        extra = {"tools": case.tools} if uses_tools else {}
        message = (
            client.chat.completions.create(
                model=model, messages=case.messages, temperature=0, max_tokens=MAX_TOKENS, **extra
            )
            .choices[0]
            .message
        )
        if message.tool_calls:
            return message.content or "", [
                {"name": c.function.name, "arguments": json.loads(c.function.arguments)} for c in message.tool_calls
            ]
        return message.content or "", parse_calls(message.content or "")

    def all_of(cases: list[Case]) -> list[Answer]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, cases))

    return all_of


def ask_transformers(folder: str, batch_size: int) -> Callable[[list[Case]], list[Answer]]:
    """Answers from transformers' greedy generate in this process, in left-padded batches of prompts of like length."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()

    def all_of(cases: list[Case]) -> list[Answer]:
        prompts = [
            tokenizer.apply_chat_template(c.messages, tools=c.tools or None, add_generation_prompt=True, tokenize=False)
            for c in cases
        ]
        order = sorted(range(len(cases)), key=lambda i: (cases[i].skill, len(prompts[i])))
        answers: dict[int, Answer] = {}
        for at in range(0, len(order), batch_size):
            part = order[at : at + batch_size]
            inputs = tokenizer([prompts[i] for i in part], return_tensors="pt", padding=True, add_special_tokens=False)
            inputs.pop("token_type_ids", None)
            with torch.inference_mode():
                out = model.generate(
                    **inputs, max_new_tokens=MAX_TOKENS, do_sample=False, temperature=None, top_p=None, top_k=None
                )
            for i, row in zip(part, out[:, inputs["input_ids"].shape[1] :]):
                text = tokenizer.decode(row, skip_special_tokens=True)
                answers[i] = text, parse_calls(text)
        return [answers[i] for i in range(len(cases))]

    return all_of


def score(cases: list[Case], answers: list[Answer]) -> dict[str, list[int]]:
    """skill -> [right, asked], in the order of the cases."""
    counts: dict[str, list[int]] = {}
    for case, (text, calls) in zip(cases, answers):
        entry = counts.setdefault(case.skill, [0, 0])
        entry[0] += is_right(case, text, calls)
        entry[1] += 1
    return counts


def markdown(counts: dict[str, list[int]]) -> str:
    lines = ["| skill | exactly right | of | % |", "|---|---:|---:|---:|"]
    lines += [
        f"| {name}{' *' if name in WANTED else ''} | {right} | {n} | {100 * right / n:.1f} |"
        for name, (right, n) in counts.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", help="a running server, such as http://127.0.0.1:8000/v1")
    where.add_argument("--model", help="a model folder, answered by transformers in this process")
    parser.add_argument("--api-key", default="none")
    parser.add_argument(
        "--tools-as-text", action="store_true", help="send cases with tools as rendered text to /v1/completions"
    )
    parser.add_argument("--count", type=int, default=100, help="cases per skill")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--skill", action="append", help="only these skills")
    parser.add_argument("--show", type=int, default=0, help="print up to N failures of each skill")
    parser.add_argument("--output", type=Path, help="write the table here")
    args = parser.parse_args()

    from tokenizers import Tokenizer

    Words.vocabulary = vocabulary_words(
        Tokenizer.from_file(str((Path(args.model) if args.model else FOLDER) / "tokenizer.json"))
    )
    cases = [c for c in build_cases(args.count, args.seed) if not args.skill or c.skill in args.skill]
    ask = (
        ask_server(args.base_url, args.api_key, args.tools_as_text, args.concurrency)
        if args.base_url
        else ask_transformers(args.model, args.batch_size)
    )
    started = time.monotonic()
    answers = ask(cases)
    shown: dict[str, int] = {}
    for case, (text, calls) in zip(cases, answers):
        if shown.get(case.skill, 0) < args.show and not is_right(case, text, calls):
            shown[case.skill] = shown.get(case.skill, 0) + 1
            wanted = case.expected["content"] or json.dumps([c["function"] for c in case.expected["tool_calls"]])
            print(f"[{case.skill}] {case.messages[-1]['content']!r}\n    wanted {wanted!r}\n    got    {text!r}")
    result = markdown(score(cases, answers))
    print(f"{result}\n\n{len(cases)} questions in {time.monotonic() - started:.0f} s")
    if args.output:
        args.output.write_text(result + "\n")


if __name__ == "__main__":
    main()
