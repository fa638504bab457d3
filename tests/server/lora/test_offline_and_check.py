"""LoRA adapters of the offline `LLM`, and what `quire check` says about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.cli import main as cli
from tests.helpers.models.checkpoints import greedy
from tests.helpers.models.lora import make_adapter, merged
from tests.helpers.server.fake_hub import FakeHub

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.mark.slow
def test_adapters_of_the_offline_llm(checkpoint, tmp_path):
    folder = checkpoint("llama-tied")
    one, two = (make_adapter(tmp_path / name, folder, 4, seed=seed) for seed, name in enumerate("ab"))
    models = [merged(folder), merged(folder, (one, 1.0)), merged(folder, (two, 1.0))]
    want = [greedy(model, PROMPT, 6)[0] for model in models]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    requests = [LoRARequest("one", 1, str(one)), LoRARequest("two", 2, str(two))]
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 32 << 20, "pooling": "lasttoken"}
    with LLM(folder, enable_lora=True, **settings) as llm:
        prompts = [{"prompt_token_ids": PROMPT}] * 3
        found = llm.generate(prompts, params, use_tqdm=False, lora_request=[None, *requests])
        assert [result.outputs[0].token_ids for result in found] == want
        (again,) = llm.generate(prompts[:1], params, use_tqdm=False, lora_request=requests[1])
        assert again.outputs[0].token_ids == want[2]
        texts = [{"prompt_token_ids": PROMPT}] * 2
        base, adapted = (one.outputs.embedding for one in llm.embed(texts, lora_request=[None, requests[0]]))
        assert llm.embed(texts[:1], lora_request=requests[0])[0].outputs.embedding == pytest.approx(adapted, abs=1e-4)
        hidden = models[1].model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
        assert torch.nn.functional.normalize(hidden, dim=0).tolist() == pytest.approx(adapted, abs=1e-3)
        assert base != pytest.approx(adapted, abs=1e-2)
        scores = [llm.score("a", "b", lora_request=one)[0].outputs.score for one in (None, requests[0])]
        assert scores[0] != pytest.approx(scores[1], abs=1e-4)
        with pytest.raises(ValueError, match=r"there is no adapter_config.json"):
            llm.generate(prompts[:1], params, use_tqdm=False, lora_request=LoRARequest("x", 3, str(tmp_path)))
        with pytest.raises(ValueError, match="lora_request: 1 for 3 prompts"):
            llm.generate(prompts, params, use_tqdm=False, lora_request=[None])


_PROGRAM = """
import sys
from quire.cli.main import main
for path in ("org/sql", "org/none"):
    main(["check", sys.argv[1], "--device", "cpu", "--log-level", "error", "--lora-modules", f"sql={path}"])
"""


@pytest.mark.slow
def test_an_adapter_of_the_hub(checkpoint, tmp_path):
    folder = checkpoint("llama-tied")
    adapter = make_adapter(tmp_path / "a", folder, 6, targets=("q_proj",))
    (adapter / "optimizer.pt").write_bytes(bytes(1000))
    with FakeHub({"org/sql": str(adapter)}).running() as hub:
        command = [sys.executable, "-c", _PROGRAM, folder]
        variables = {**os.environ, **hub.environment(tmp_path / "cache")}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
        assert "LoRA adapter sql: rank 6, 2 modules: q_proj" in done.stdout, done.stderr
        assert "--lora-modules sql: there is no folder org/none, and no such model on the Hugging" in done.stderr
        assert hub.sent["adapter_model.safetensors"] and not hub.sent["optimizer.pt"]


def test_check_tells_ranks_and_modules(checkpoint, tmp_path, capsys):
    folder = checkpoint("llama-tied")
    adapter = make_adapter(tmp_path / "a", folder, 6, targets=("q_proj", "up_proj"))
    assert cli.main(["check", folder, "--lora-modules", f"sql={adapter}"]) == 0
    assert "LoRA adapter sql: rank 6, 4 modules: q_proj, up_proj" in (out := capsys.readouterr().out)
    assert "as many adapters of the largest rank as may be loaded" in out
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    assert cli.main(["check", folder, "--lora-modules", f"sql={adapter}"]) == 1
    assert "--lora-modules sql: adapter_config.json: use_dora: DoRA" in capsys.readouterr().err
