"""lm-eval runs a small local task through a running `quire serve` (the embedded model): log-probabilities of choices by
`local-completions`, and texts by `local-chat-completions`.

In an environment of its own, because its packages are many:
    python -m venv FOLDER && FOLDER/bin/pip install 'lm_eval[api]' transformers
    quire serve --port 8000 &
    FOLDER/bin/python tests/clients/lm_eval_tasks.py http://127.0.0.1:8000
Prints the accuracies, and ends with status 1 if the model's answers to these questions, which it knows, are not found.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "unused"}
NAME = "quire-tiny"
TOKENIZER = Path(__file__).parents[2] / "configs" / NAME
CAPITALS = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome"}


def write_tasks(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a task of choices, and of one of texts."""
    rows = [{"country": country, "cities": list(CAPITALS.values()), "answer": i} for i, country in enumerate(CAPITALS)]
    (folder / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{folder}/capitals.jsonl"}, "cache_dir": f"{folder}/cache"},
        "test_split": "test",
    }
    choices = data | {
        "task": "capitals",
        "output_type": "multiple_choice",
        "doc_to_text": "The capital of {{country}} is",
        "doc_to_choice": "{{cities}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    texts = data | {
        "task": "capitals_in_chat",
        "output_type": "generate_until",
        "doc_to_text": "What is the capital of {{country}}?",
        "doc_to_target": "{{cities[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 30, "temperature": 0},
        "filter_list": [
            {
                "name": "city",
                "filter": [
                    {"function": "regex", "regex_pattern": f"({'|'.join(CAPITALS.values())})"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match"}],
    }
    return choices, texts


def accuracy(kind: str, url: str, task: dict[str, Any], metric: str, **settings: Any) -> float:
    import lm_eval

    arguments = {"model": NAME, "base_url": url, "num_concurrent": 2, **settings}
    found = lm_eval.simple_evaluate(kind, model_args=arguments, tasks=[task], apply_chat_template="chat" in kind)
    value = found["results"][task["task"]][metric]
    print(f"{kind}: {task['task']} {value:.2f}", flush=True)
    return value


def main() -> int:
    url = (sys.argv[1:] or ["http://127.0.0.1:8000"])[0]
    with tempfile.TemporaryDirectory() as folder:
        choices, texts = write_tasks(Path(folder))
        values = [
            accuracy("local-completions", f"{url}/v1/completions", choices, "acc,none", tokenizer=str(TOKENIZER)),
            accuracy("local-chat-completions", f"{url}/v1/chat/completions", texts, "exact_match,city"),
        ]
    return int(min(values) < 1)


if __name__ == "__main__":
    sys.exit(main())
