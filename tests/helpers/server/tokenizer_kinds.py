"""Writes small tokenizer folders of every kind that models use, trained on a few lines, to compare with transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It isn't the first time, they've said so!",
    "Der Zähler läuft über die Größe; café, naïve, señor, Ångström, œuvre.",
    "def main(argc: int) -> None:\n    print('hello world', argc)\n\treturn 0  # ok",
    "Привет, мир! Как дела? 你好，世界。こんにちは 세계",
    "User: What's 12 + 30?\nAssistant: 42.\n\n### End of turn <stop> 😀👩‍👩‍👧 ✓",
] * 4

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def _write(folder: Path, tokenizer: Tokenizer | dict, settings: dict, **files: dict) -> Path:
    folder.mkdir(parents=True)
    text = json.dumps(tokenizer) if isinstance(tokenizer, dict) else tokenizer.to_str()
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    )
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def byte_level(folder: Path) -> Path:
    """Write GPT-2's and Qwen's kind: byte-level BPE, ChatML tokens, and an added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [AddedToken("<tool_call>", special=False), AddedToken("a b", special=False), AddedToken("｜é｜", special=True)]
    )
    config = {
        "eos_token": "<|im_end|>",
        "bos_token": None,
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": True,
        "add_bos_token": False,
    }
    return _write(folder, tokenizer, config, generation_config={"eos_token_id": [2, 0]})


def llama3(folder: Path) -> Path:
    """Write Llama 3's kind: a split by regular expression, byte-level, a start token from the post-processor, flags of
    added tokens in the configuration.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|> $B:1",
                special_tokens=[("<|begin_of_text|>", 0)],
            ),
        ]
    )
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    decoder = {str(i): {"content": content, **flags} for i, content in enumerate(specials)}
    decoder[str(tokenizer.get_vocab_size())] = {"content": "<|python_tag|>", **flags}
    config = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "added_tokens_decoder": decoder,
        "clean_up_tokenization_spaces": True,
    }
    return _write(folder, tokenizer, config, generation_config={"eos_token_id": [1, 4]})


def _byte_fallback_bpe() -> dict:
    """Return tokenizer.json of a BPE over characters with 256 byte tokens, like converted sentencepiece models."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=560, special_tokens=["<unk>", "<s>", "</s>", *BYTE_TOKENS], limit_alphabet=70, show_progress=False
    )
    tokenizer.train_from_iterator([line.split("\n")[0] for line in CORPUS], trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    return data


def _llama2_json() -> dict:
    data = _byte_fallback_bpe()
    data["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    data["decoder"] = json.loads(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
        ).__getstate__()
    )
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return json.loads(tokenizer.to_str())


def llama2(folder: Path) -> Path:
    """Write Llama 2's and Mistral's kind of tokenizer.json: metaspace, byte fallback, one leading space stripped;
    special tokens in a separate file.
    """
    return _write(
        folder,
        _llama2_json(),
        {"add_bos_token": True, "add_eos_token": False, "legacy": False},
        special_tokens_map={
            "bos_token": {"content": "<s>", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False},
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "additional_special_tokens": ["<extra>"],
        },
        added_tokens={"<extra>": 560},
    )


def llama2_class(folder: Path, **config) -> Path:
    """Write the same, declared as LlamaTokenizer, whose pipeline transformers rebuilds."""
    return _write(
        folder, _llama2_json(), {"tokenizer_class": "LlamaTokenizer", **config}, config={"model_type": "llama"}
    )


def llama2_class_legacy(folder: Path) -> Path:
    return llama2_class(
        folder,
        legacy=True,
        bos_token={
            "__type": "AddedToken",
            "content": "<s>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
        },
    )


def llama2_class_no_prefix(folder: Path) -> Path:
    return llama2_class(folder, add_prefix_space=False)


def gemma(folder: Path) -> Path:
    """Write Gemma's kind: as Llama 2's, without the prefix space."""
    data = _byte_fallback_bpe()
    data["decoder"] = json.loads(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]).__getstate__()
    )
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.add_special_tokens(["<bos>", "<start_of_turn>", "<end_of_turn>"])
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", bos)]
    )
    return _write(folder, tokenizer, {"bos_token": "<bos>", "eos_token": "</s>", "image_token": "<image>"})


def unigram(folder: Path) -> Path:
    """Write T5's kind, a sentencepiece unigram model: the metaspace decoder, clean-up on."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=220, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    return _write(
        folder,
        tokenizer,
        {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "clean_up_tokenization_spaces": True},
    )


def word_piece(folder: Path) -> Path:
    """Write BERT's kind: pieces with ##, spaces between words made by the decoder, clean-up on."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return _write(
        folder,
        tokenizer,
        {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "clean_up_tokenization_spaces": True},
    )


def word_level(folder: Path) -> Path:
    """Write whole words and no decoder: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordLevelTrainer(special_tokens=["<unk>", "<eos>"], show_progress=False)
    )
    return _write(folder, tokenizer, {"eos_token": "<eos>", "clean_up_tokenization_spaces": True})


def suffix_bpe(folder: Path) -> Path:
    """Write CLIP's kind: words end in </w>, a decoder without a specialised stream class."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<eos>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _write(folder, tokenizer, {"eos_token": "<eos>"})


KINDS = {
    f.__name__: f
    for f in (
        byte_level,
        llama3,
        llama2,
        llama2_class,
        llama2_class_legacy,
        llama2_class_no_prefix,
        gemma,
        unigram,
        word_piece,
        word_level,
        suffix_bpe,
    )
}
