"""Splitting of text into words by byte-level tokenizers of GGUF files, before bytes are merged, by
`tokenizer.ggml.pre`.

The patterns are those of the tokenizers' own files (tokenizer.json), of which llama.cpp has variants.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf"{_SYMBOLS}|{_SPACES}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str, lower: str, digits: str = r"\p{N}{1,3}", symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*") -> str:
    """Return the pattern of GPT-4o: words end where a capital follows a small letter."""
    begin = r"[^\r\n\p{L}\p{N}]?"
    words = (f"{begin}{upper}{a}{lower}{b}{_CONTRACTIONS}?" for a, b in ("*+", "+*"))
    return "|".join([*words, digits, symbols, _SPACES])


_GPT4O = _cased(f"[{_UPPER}]", f"[{_LOWER}]")
_KIMI = r"\p{Han}+|" + _cased(f"[{_UPPER}&&[^\\p{{Han}}]]", f"[{_LOWER}&&[^\\p{{Han}}]]", symbols=_SYMBOLS)
_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK3 = rf"{_PUNCTUATED}[\r\n]*|{_SPACES}"
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
    r"\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2 = (
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|"
    + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"|\s{1}"
)
_FROM_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)"  # digits in threes
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_HAN, _KANA = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WIDE_PUNCTUATION = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_CASED = (
    "["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)  # letters with an upper or lower case in Unicode 11
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)


@dataclass(frozen=True, slots=True)
class Split:
    """A split by `patterns`, applied one after another. `whole_words`: a word that is a token is not merged from bytes.
    `nfc`: texts are normalized to NFC first. `begins`: texts begin with BOS if the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False
    begins: bool = False


SPLITS: dict[str, Split] = {
    "afmoe": Split((_FROM_RIGHT, _ASIAN, _DEEPSEEK3)),
    "bailingmoe": Split((_BAILING,)),
    "bloom": Split((_BLOOM,)),
    "chameleon": Split(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            "([\\t\\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        begins=True,
    ),
    "dbrx": Split((_LLAMA3,)),
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-llm": Split((r"[\r\n]", rf"\s?{_CASED}", rf"\s?{_WIDE_PUNCTUATION}", r"\s+$", _HAN, r"\p{N}")),
    "deepseek-v3": Split((r"\p{N}{1,3}", _KANA, _DEEPSEEK3)),
    "exaone-moe": Split((_EXAONE_MOE,)),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "glm4": Split((_LLAMA3,), whole_words=True),
    "gpt-2": Split((_GPT2,)),
    "gpt-4o": Split((_GPT4O,)),
    "granite-embed-multi-97m": Split((_GPT4O,), whole_words=True),
    "grok-2": Split((_QWEN2,)),
    "jais-2": Split((_JAIS2,)),
    "kimi-k2": Split((_KIMI,), whole_words=True),
    "laguna": Split((r"[^\n]+|[\n]+", _QWEN2)),
    "llama-bpe": Split((_LLAMA3,), whole_words=True, begins=True),
    "minicpm5": Split((r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_REST}"), whole_words=True),
    "qwen2": Split((_QWEN2,), nfc=True),
    "qwen35": Split((_QWEN35,), nfc=True),
    "seed-coder": Split((_SEED,)),
    "spark2_5": Split((r"\p{N}{1,3}", _KANA, rf"{_PUNCTUATED}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "starcoder": Split((r"\p{N}", _GPT2)),
    "superbpe": Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "tekken": Split((_TEKKEN,), whole_words=True, begins=True),
    "tiny_aya": Split((_FROM_RIGHT, _GPT4O)),
    "ufakzeka": Split((rf"{_WORDS}|\p{{N}}|{_REST}",)),
    "viking": Split((_BLOOM, r"\p{N}")),
    "youtu": Split((_YOUTU, _cased(f"[{_UPPER}]", f"[{_LOWER}]", r"\p{N}")), whole_words=True),
}
_SAME: dict[str, tuple[str, ...]] = {
    "bailingmoe": ("bailingmoe2", "llada-moe"),
    "bloom": ("gpt3-finnish", "poro-chat"),
    "dbrx": ("smaug-bpe",),
    "deepseek-v3": ("hunyuan-dense", "hy_v4", "joyai-llm"),
    "glm4": ("chatglm-bpe", "glm5"),
    "gpt-2": (
        *("a.x-4.0", "exaone4", "gigachat", "gpt2", "granite-docling", "jais", "jina-de", "jina-es"),
        *("jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es", "mellum", "modern-bert", "mpt", "olmo", "phi-2"),
        *("roberta-bpe", "trillion"),
    ),
    "gpt-4o": ("kanana2", "llama4", "minimax-m2", "talkie"),
    "llama-bpe": ("falcon-h1", "falcon3", "jina-v5-nano", "lfm2", "llama-v3", "llama3", "midm-2.0", "pixtral"),
    "qwen2": ("deepseek-r1-qwen", "f2llmv2", "hunyuan", "kormo", "megrez", "solar-open", "stablelm2"),
    "starcoder": ("codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "smollm"),
    "tiny_aya": ("cohere2moe",),
}
ALIASES = {other: name for name, others in _SAME.items() for other in others}


def find_split(name: str) -> Split:
    """Return the split that `tokenizer.ggml.pre` names. Raises ValueError if there is none."""
    found = SPLITS.get(ALIASES.get(name, name))
    if found is None:
        raise ValueError(
            f"tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(sorted(SPLITS | ALIASES))}. Name the "
            "tokenizer of the original model with --tokenizer"
        )
    return found
