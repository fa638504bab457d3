"""A model whose files have an adapter per task (jina-embeddings-v5): each is served by the task's name, and requests
for the model itself use that for retrieval.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.cli import main as cli
from quire.server.startup.task_adapters import task_modules
from quire.worker.models.registry import read_model_spec
from tests.helpers.models.embedders import TEXTS, build_embedder
from tests.helpers.models.lora import make_adapter, merged, write_adapter
from tests.helpers.server.fake_hub import FakeHub
from tests.helpers.server.running import MODEL, running_server

TASKS = ["retrieval", "text-matching"]
CONFIG = {"architectures": ["JinaEmbeddingsV5Model"], "model_type": "jina_embeddings_v5", "task_names": TASKS}


def change(folder: Path, **keys) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder in the published form, and the language model's folder and its adapters, for the reference."""
    folder = tmp_path_factory.mktemp("jina") / "model"
    build_embedder("qwen3", folder)
    whole = folder.with_name("model-lm")
    adapters = {task: make_adapter(folder.parent / task, str(whole), 4, seed) for seed, task in enumerate(TASKS)}
    for task, path in adapters.items():
        tensors = load_file(path / "adapter_model.safetensors")
        bare = {name.replace("base_model.model.model.", "base_model.model."): one for name, one in tensors.items()}
        write_adapter(folder / "adapters" / task, json.loads((path / "adapter_config.json").read_text()), bare)
    change(folder, **CONFIG)
    return folder, str(whole), adapters


@pytest.mark.slow
def test_each_task_has_the_vectors_of_its_merged_model(published):
    folder, whole, adapters = published
    settings = {"distributed_executor_backend": "uniproc", "dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
    with running_server(str(folder), **settings) as running:
        server = running.wait_ready(120)
        assert {one.id for one in server.openai.models.list()} >= {MODEL, *TASKS}
        ids = server.state.tokenizer.encode_batch(TEXTS)
        for name, task in ((MODEL, "retrieval"), ("retrieval", "retrieval"), ("text-matching", "text-matching")):
            model = merged(whole, (adapters[task], 1.0)).model
            found = torch.tensor(
                [one.embedding for one in server.openai.embeddings.create(model=name, input=TEXTS).data]
            )
            with torch.inference_mode():
                want = torch.stack([model(torch.tensor([one])).last_hidden_state[0, -1] for one in ids])
            torch.testing.assert_close(found, torch.nn.functional.normalize(want, dim=1), atol=2e-5, rtol=2e-4)


@pytest.mark.slow
def test_adapters_of_a_model_of_the_hub_are_downloaded(published, tmp_path):
    name = "org/jina-embeddings-v5-tiny"
    with FakeHub({name: str(published[0])}).running() as hub:
        command = [sys.executable, "-m", "quire", "check", name, "--device", "cpu", "--log-level", "error"]
        variables = {**os.environ, **hub.environment(tmp_path / "cache")}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        assert done.returncode == 0, done.stderr
        assert named_adapters(done.stdout) == TASKS
        assert hub.sent["adapters/retrieval/adapter_model.safetensors"] > 1000


def named_adapters(out: str) -> list[str]:
    """Return the adapters that `quire check` lists."""
    return [line.split(":")[0].split()[-1] for line in out.splitlines() if "LoRA adapter " in line]


def test_check_lists_the_adapters(published, capsys):
    assert cli.main(["check", str(published[0])]) == 0
    assert named_adapters(capsys.readouterr().out) == TASKS


@pytest.mark.parametrize("names", [None, "retrieval", [1], [""], ["../up"], [".."], ["a/b"]])
def test_names_of_tasks_that_are_no_folders_are_refused(names, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"task_names": names}))
    with pytest.raises(ValueError, match=r"config\.json.*task_names must list names of folders"):
        task_modules(str(tmp_path), None, None)


def test_other_models_have_no_tasks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3Model"], "task_names": TASKS}))
    assert task_modules(str(tmp_path), None, None) == []


def test_the_encoder_of_the_family_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"is_decoder": False}))
    with pytest.raises(ValueError, match=r"is_decoder: jina-embeddings-v5 over an encoder"):
        read_model_spec(str(tmp_path))
