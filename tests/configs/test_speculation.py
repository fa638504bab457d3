"""`--speculative-config` and llama.cpp's flags for the same settings."""

from __future__ import annotations

import json

import pytest

from quire.configs.speculation import SpeculationSettings, read_speculation
from tests.cli.test_cli import refused, served  # noqa: F401


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("{}", SpeculationSettings("auto")),
        ('{"method": "none"}', SpeculationSettings("none")),
        ('{"method": "grammar", "num_speculative_tokens": 1}', SpeculationSettings("grammar", 1)),
        ('{"method": "suffix", "num_speculative_tokens": 64}', SpeculationSettings("suffix", 64)),
        ('{"model": "org/small"}', SpeculationSettings("draft_model", model="org/small")),
        ('{"prompt_lookup_max": 4, "prompt_lookup_min": 2}', SpeculationSettings("ngram", None, 2, 4)),
    ],
)
def test_settings(text, settings):
    assert read_speculation(text) == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"method": "medusa"}', 'method is "medusa", but must be one of auto, ngram'),
        ('{"method": 3}', "method is 3"),
        ('{"num_tokens": 3}', "unknown key num_tokens; the keys are method"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens is 0, but must be a whole number from 1 to 64"),
        ('{"num_speculative_tokens": 65}', "num_speculative_tokens is 65"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens is true"),
        ('{"num_speculative_tokens": 2.5}', "num_speculative_tokens is 2.5"),
        ('{"method": "draft_model"}', "method draft_model needs a model"),
        ('{"method": "eagle3"}', "method eagle3 needs a model: its folder or Hub id"),
        ('{"model": ""}', "method draft_model needs a model"),
        ('{"model": "m", "method": "ngram"}', "model belongs to the methods draft_model and eagle3, not to ngram"),
        ('{"method": "suffix", "prompt_lookup_max": 3}', "belong to method ngram"),
        ('{"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 4}', "must not exceed"),
    ],
)
def test_wrong_settings_are_refused_at_start(refused, text, message):  # noqa: F811
    said = refused("m", "--speculative-config", text)
    assert "--speculative-config: " in said and message in said


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        (["--spec-type", "ngram-simple", "--draft-max", "8"], {"method": "ngram", "num_speculative_tokens": 8}),
        (["--spec-type=none"], {"method": "none"}),
        (["--spec-type", "draft-eagle3", "-md", "head"], {"method": "eagle3", "model": "head"}),
        (["-md", "small", "--draft-max", "8"], {"model": "small", "num_speculative_tokens": 8}),
        (["--spec-type", "draft-simple", "--model-draft", "s"], {"method": "draft_model", "model": "s"}),
        (["--draft", "5", "--draft-min", "1"], {"num_speculative_tokens": 5}),
        (["--draft_n", "5", "--draft-max", "5"], {"num_speculative_tokens": 5}),
        (["--spec-draft-model", "s", "--spec-draft-n-max", "8"], {"model": "s", "num_speculative_tokens": 8}),
        (
            ["--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-m", "9"],
            {"method": "suffix", "num_speculative_tokens": 9},
        ),
        (["--spec-type", "draft-mtp,ngram-mod", "--spec-draft-n-min", "0"], {"method": "auto"}),
        (["--spec-type", "none,ngram-simple"], {"method": "ngram"}),
        (["--spec-type", "ngram-simple,ngram-map-k"], {"method": "suffix"}),
    ],
)
def test_flags_of_llamacpp(served, flags, values):  # noqa: F811
    assert json.loads(served("m", *flags)[0].scheduler.speculative_config) == values


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--spec-type", "magic"], "--spec-type: 'magic' is not one of none, draft"),
        (["--spec-type", "ngram-simple,magic"], "--spec-type: 'magic' is not one of none, draft"),
        (["--spec-type", "draft-mtp,draft-eagle3"], "only lookups and draft-mtp can be combined"),
        (["--draft-max", "65"], "--draft-max: num_speculative_tokens is 65"),
        (["--draft-max", "many"], "--draft-max: expected a whole number"),
        (["--draft-max", "3", "--draft", "4"], "--draft-max 3 and --draft 4 set the same"),
        (["--draft-min", "4"], "--draft-min: drafts of any length are verified"),
        (["--draft-max", "3", "--speculative-config", "{}"], "--draft-max and --speculative-config set the same"),
    ],
)
def test_wrong_flags_of_llamacpp(refused, flags, message):  # noqa: F811
    assert message in refused("m", *flags)


def test_types_of_llamacpp_that_need_a_model_name_it(refused):  # noqa: F811
    assert "--spec-type: method draft_model needs a model" in refused("m", "--spec-type", "draft-simple")
