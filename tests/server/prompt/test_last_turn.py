"""Where the user's last message begins in a prompt, at which models with recurrent states leave a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.configs.serving import ServerConfig
from quire.server.model_info import Preset
from quire.server.prompt.drafts import rendered
from quire.server.prompt.encode import encoded
from quire.server.request.formats import Formats
from quire.server.request.request import Conversation, GenerationOptions, GenerationSpec
from quire.server.text.tokenizer import Tokenizer
from tests.helpers.models.checkpoints import build_tokenizer

HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "again and again"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return Tokenizer.load(str(folder))


def found(tokenizer: Tokenizer, messages: list[dict], keeps_states: bool = True) -> tuple[int, list[int]]:
    model = SimpleNamespace(keeps_states=keeps_states, preset=Preset(), max_model_len=4096)
    config = SimpleNamespace(server=ServerConfig())
    state = SimpleNamespace(tokenizer=tokenizer, model=model, config=config, formats=Formats())
    spec = GenerationSpec(request_id="one", prompts=Conversation(messages), options=GenerationOptions())
    (prompt,) = encoded(rendered(spec, state), spec, state)
    assert prompt.ids == tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    return prompt.turn_start, prompt.ids


@pytest.mark.parametrize("content", ["again and again", [{"type": "text", "text": " what now? "}]])
def test_tokens_before_the_last_message_are_those_of_any_other_one(tokenizer, content):
    count, ids = found(tokenizer, [*HISTORY, {"role": "user", "content": content}])
    other, edited = found(tokenizer, [*HISTORY, {"role": "user", "content": "Something else."}])
    assert count == other and ids[:count] == edited[:count]
    assert count > len(tokenizer.encode(tokenizer.render_chat(HISTORY), add_special_tokens=False)) // 2


def test_results_of_tools_after_it_change_nothing(tokenizer):
    question = [*HISTORY, {"role": "user", "content": "what now?"}]
    later = [*question, {"role": "assistant", "content": "Wait."}]
    assert found(tokenizer, later)[0] == found(tokenizer, question)[0]


@pytest.mark.parametrize("messages", [HISTORY[:1], [{"role": "user", "content": " "}]])
def test_unknown(tokenizer, messages):
    assert found(tokenizer, messages)[0] == 0


def test_models_without_states_need_none(tokenizer):
    assert found(tokenizer, [*HISTORY, {"role": "user", "content": "what now?"}], keeps_states=False)[0] == 0
