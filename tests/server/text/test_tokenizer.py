"""The tokenizer against transformers, over every kind of tokenizer."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer

from quire.server.text.tokenizer import Tokenizer
from tests.helpers.server.tokenizer_kinds import CHATML, KINDS, byte_level, llama3

transformers = pytest.importorskip("transformers")

SNIPPETS = [
    "Hello world",
    " leading",
    "trailing ",
    "  two  spaces",
    "\n\n",
    "\t",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "a b",
    "｜é｜",
    "<extra>",
    "<image>",
    "[SEP]",
    "don't do not .",
    " ' s 've",
    "é́",
    "你好，世界",
    "😀👩‍👩‍👧",
    "\x00",
    "\u200b",
    "▁",
    "##ing",
    "<0x41>",
    "über",
    "123456",
    "｡",
    "ﬁ",
    "<eos>",
    "<unk>",
]
texts = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=8)), max_size=8).map("".join)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: build(root / name) for name, build in KINDS.items()}


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request, folders):
    folder = folders[request.param]
    return Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(str(folder))


class TestAgainstTransformers:
    @pytest.mark.slow
    @settings(max_examples=60, deadline=None)
    @given(text=texts)
    def test_encode(self, pair, text):
        ours, reference = pair
        for add_special_tokens in (True, False):
            assert ours.encode(text, add_special_tokens) == reference.encode(
                text, add_special_tokens=add_special_tokens
            )

    @pytest.mark.slow
    @settings(max_examples=60, deadline=None)
    @given(text=texts, data=st.data())
    def test_decode(self, pair, text, data):
        ours, reference = pair
        random_ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3), max_size=12))
        for ids in (ours.encode(text), random_ids):
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)

    def test_vocabulary_and_special_tokens(self, pair):
        ours, reference = pair
        assert ours.vocab_size == len(reference)
        assert ours.special_tokens == reference.special_tokens_map
        assert ours.special_ids == {i for i, token in reference.added_tokens_decoder.items() if token.special}
        for token, token_id in reference.get_vocab().items():
            assert ours.token_to_id(token) == token_id
        assert ours.max_token_chars >= max(len(token) for token in reference.get_vocab())
        if reference.eos_token_id is not None:
            assert ours.eos_token_ids[0] == reference.eos_token_id


class TestTokenText:
    def test_pieces_of_one_character_are_bytes(self, folders):
        tokenizer = Tokenizer.load(folders["byte_level"])
        ids = tokenizer.encode("🦊")
        assert len(ids) > 1
        assert b"".join(tokenizer.token_bytes(i) for i in ids) == "🦊".encode()
        assert "".join(tokenizer.id_to_token(i) for i in ids) == r"\xf0\x9f\xa6\x8a"

    @pytest.mark.parametrize("kind", ["byte_level", "llama3", "llama2", "gemma"])
    def test_bytes_add_up_to_the_text(self, folders, kind):
        tokenizer = Tokenizer.load(folders[kind])
        text = "Der Zähler 你好 🦊, 42!"
        data = b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text, False))
        assert data.decode().removeprefix(" ") == text

    def test_special_tokens_show_their_name(self, folders):
        tokenizer = Tokenizer.load(folders["byte_level"])
        assert [tokenizer.id_to_token(tokenizer.token_to_id(t)) for t in ("<|im_end|>", "｜é｜")] == [
            "<|im_end|>",
            "｜é｜",
        ]
        assert tokenizer.id_to_token(tokenizer.vocab_size + 5) == ""


def test_unpaired_surrogates_are_refused(folders):
    with pytest.raises(ValueError, match="surrogates"):
        Tokenizer.load(folders["byte_level"]).encode("a\ud800")


class TestLoading:
    def test_torch_and_transformers_stay_out(self, folders):
        code = (
            "import sys; from quire.server.text.tokenizer import Tokenizer; t = Tokenizer.load(sys.argv[1]);"
            "t.render_chat([{'role': 'user', 'content': 'x'}]); t.encode('x'); assert not {'torch', "
            "'transformers'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code, str(folders["byte_level"])], check=True)

    def test_end_tokens_of_the_generation_config_are_included(self, folders):
        assert Tokenizer.load(folders["llama3"]).eos_token_ids == [4, 1]
        assert Tokenizer.load(folders["byte_level"]).eos_token_ids == [2, 0]

    def test_folder_without_tokenizer_json_goes_through_transformers(self, tmp_path, caplog):
        source = byte_level(tmp_path / "source")
        folder = tmp_path / "slow"
        folder.mkdir()
        model = json.loads((source / "tokenizer.json").read_text())["model"]
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        (folder / "merges.txt").write_text(
            "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]) + "\n"
        )
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "chat_template": CHATML})
        )
        with caplog.at_level("INFO", logger="quire.tokenizer"):
            tokenizer = Tokenizer.load(folder)
        assert "no tokenizer.json" in caplog.text
        reference = transformers.AutoTokenizer.from_pretrained(str(folder))
        text = "The quick 🦊 isn't über"
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.decode(reference.encode(text)) == text
        assert tokenizer.render_chat([{"role": "user", "content": "x"}]).endswith("assistant\n")

    def test_tokenizer_written_in_python(self, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
        tokenizer = Tokenizer.load(tmp_path)
        reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
        text = "Größe 🦊"
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text) and tokenizer.encode(text, False) == ids[:-1]
        stream = tokenizer.stream(())
        assert "".join(stream.push([i]) for i in ids) + stream.finish() == text == tokenizer.decode(ids)

    def test_nothing_to_load(self, tmp_path):
        with pytest.raises(ValueError, match="there are no tokenizer files in"):
            Tokenizer.load(tmp_path)
        with pytest.raises(ValueError, match="there is no folder"):
            Tokenizer.load(tmp_path / "absent")
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ValueError, match="cannot be read"):
            Tokenizer.load(tmp_path)

    def test_template_files_and_names(self, tmp_path):
        folder = llama3(tmp_path / "m")
        assert Tokenizer.load(folder).chat_templates == {}
        with pytest.raises(ValueError, match="no chat template"):
            Tokenizer.load(folder).render_chat([{"role": "user", "content": "x"}])
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = [
            {"name": "default", "template": "default"},
            {"name": "tool_use", "template": "tools"},
        ]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.load(folder)
        messages = [{"role": "user", "content": "x"}]
        assert tokenizer.render_chat(messages) == "default"
        assert tokenizer.render_chat(messages, tools=[]) == "tools"
        assert tokenizer.render_chat(messages, chat_template="tool_use") == "tools"
        assert tokenizer.render_chat(messages, chat_template="{{ bos_token }}!") == "<|begin_of_text|>!"
        (folder / "chat_template.jinja").write_text("from a file")
        assert Tokenizer.load(folder).render_chat(messages, tools=[]) == "from a file"
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
        reference = transformers.AutoTokenizer.from_pretrained(str(folder))
        assert Tokenizer.load(folder).chat_templates == reference.chat_template

    def test_template_given_at_start(self, tmp_path):
        folder = byte_level(tmp_path / "m")
        (tmp_path / "t.jinja").write_text("{{ messages|length }}")
        messages = [{"role": "user", "content": "x"}]
        assert Tokenizer.load(folder, chat_template=str(tmp_path / "t.jinja")).render_chat(messages) == "1"
        assert Tokenizer.load(folder, chat_template="{{ messages[0].role }}").render_chat(messages) == "user"
        assert Tokenizer.load(folder, chat_template="{{ 1 }}" + "a" * 300).render_chat(messages) == "1" + "a" * 300
        with pytest.raises(ValueError, match="there is no file"):
            Tokenizer.load(folder, chat_template="absent.jinja")
        with pytest.raises(ValueError, match=r"as a file: .*too long"):
            Tokenizer.load(folder, chat_template="a" * 300)
        with pytest.raises(ValueError, match="not valid"):
            Tokenizer.load(folder, chat_template="{% if %}")

    def test_only_templates_without_default(self, tmp_path):
        tokenizer = Tokenizer(
            RustTokenizer.from_file(str(byte_level(tmp_path / "m") / "tokenizer.json")),
            {},
            {"rag": "r", "tool_use": "t"},
        )
        with pytest.raises(ValueError, match="rag, tool_use"):
            tokenizer.render_chat([{"role": "user", "content": "x"}])


class TestSpacesBetweenSpecialTokens:
    def test_word_pieces(self, folders):
        tokenizer = Tokenizer.load(folders["word_piece"])
        ids = [*tokenizer.encode("fox"), *tokenizer.encode("fox")]
        assert tokenizer.decode(ids, False) == "[CLS] fox [SEP] [CLS] fox [SEP]"
        for skip, text in ((False, "[CLS] fox [SEP][CLS] fox [SEP]"), (True, "fox fox")):
            stream = tokenizer.stream((), skip, False)
            assert stream.push(ids) + stream.finish() == text
