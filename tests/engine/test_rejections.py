"""The worker rejects a request in a step with other requests that share its prefix; over a real model."""

from __future__ import annotations

import pytest

from quire.engine.messages import SamplingParams
from tests.helpers.in_process import InProcessEngine

SETTINGS = dict(
    block_size=4, num_gpu_blocks_override=200, max_num_batched_tokens=64, max_num_seqs=8, max_model_len="200"
)
PREFIX = [(7 * i) % 480 + 4 for i in range(24)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("walls", [1, 2])
def test_a_rejected_request_changes_nobodys_text(checkpoint, monkeypatch, depth, walls):
    """The rejected request is the first to fill the blocks.

    Requests that share them, and requests that find them later, get the same tokens.
    """
    engine = InProcessEngine(checkpoint("qwen3"), steps_in_flight=depth, **SETTINGS)
    prompts = [[*PREFIX, 5, 6, 7, 8, 9], [*PREFIX, 5, 6, 7, 8, 10], [*PREFIX, 11]]
    alone = []
    for prompt in prompts:
        alone.append(engine.generate([prompt], GREEDY)[0].token_ids)
        engine.scheduler.kv.reset_prefix_cache()
    rejected = SamplingParams(max_tokens=8, temperature=0.0, bad_words_ids=[[engine.ready.vocab_size]])
    if walls == 1:
        with pytest.raises(ValueError, match="bad_words"):
            engine.generate([prompts[0]], rejected)
    else:
        monkeypatch.setattr("quire.engine.scheduler.check_request", lambda *args: None)
        first, *victims = engine.generate([[*PREFIX, 1], *prompts[:2]], [rejected, GREEDY, GREEDY])
        assert "bad_words" in first.error and [victim.token_ids for victim in victims] == alone[:2]
    assert [result.token_ids for result in engine.generate(prompts, GREEDY)] == alone
    engine.close()
