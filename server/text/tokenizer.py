"""Converts text to token ids and back with the `tokenizers` library.

Importing transformers is avoided: it takes seconds and loads torch.

Reads a model folder as transformers does (tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat
templates) and gives the same ids, texts and prompts. Folders without tokenizer.json go through transformers once, at
load time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers

from quire.checkpoints.files import check_readable
from quire.checkpoints.reading import read_object, reading
from quire.checkpoints.sentence_settings import transformer_settings
from quire.checkpoints.templates import model_templates
from quire.server.text import plamo
from quire.server.text.breakers import BreakerIndex
from quire.server.text.chat_template import ChatTemplate, compile_template
from quire.server.text.incremental_decoding import (
    REPLACEMENT,
    CleanUpStream,
    WindowDecoding,
    byte_alphabet,
    clean_up_spaces,
    decoding_of,
)
from quire.server.values import Json

logger = logging.getLogger("quire.tokenizer")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# every kind of tokenizer has at least one of these
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "*.bpe", "merges*")

# Our own threads (`threads.py`) encode texts, so the library's thread pool only costs time, and it logs a warning when
# the process starts the engine.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """A model's tokenizer and chat template. Immutable after loading; every method may be called from any thread."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer | _PythonTokenizer | plamo.PlamoTokenizer,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        clean_up: bool = False,
        eos_token_ids: Sequence[int] = (),
    ):
        self._backend = backend
        self.special_tokens = dict(special_tokens)  # name ("bos_token") -> text: variables of the chat template
        self.chat_templates = dict(chat_templates)  # name -> source; a single template is "default"
        self.eos_token_ids = list(eos_token_ids)
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_texts = {token_id: token.content for token_id, token in added.items()}
        self._clean_up = clean_up
        fast = isinstance(backend, tokenizers.Tokenizer)
        self._decoding = decoding_of(backend) if fast else backend.decoding()

    @classmethod
    def load(
        cls, folder: str | os.PathLike, *, chat_template: str | None = None, trust_remote_code: bool = False
    ) -> Tokenizer:
        """Load from a local folder. `chat_template` is a file or the text of a template to use instead of the model's.

        Raises ValueError if the folder has no usable tokenizer or the template is not valid.
        """
        folder = Path(folder)
        if folder.is_dir():
            check_readable(str(folder), "tokenizer")
        with reading(folder):
            if (folder / "tokenizer.json").is_file():
                tokenizer = _load_fast(cls, folder)
            elif (folder / plamo.FILE).is_file():
                tokenizer = _load_plamo(cls, folder)
            else:
                tokenizer = _load_with_transformers(cls, folder, trust_remote_code)
            tokenizer.lower_case_as_declared(folder)
        if tokenizer.vocab_size <= len(tokenizer.special_ids):
            raise ValueError(
                f"tokenizer: the vocabulary in {folder} is empty (it has {tokenizer.vocab_size} special tokens "
                "and nothing else): "
                "download the tokenizer's files again, or name another folder or Hub id with --tokenizer"
            )
        if chat_template is not None:
            tokenizer.chat_templates = {"default": _read_template(chat_template)}
        for source in tokenizer.chat_templates.values():
            compile_template(source)
        return tokenizer

    def lower_case_as_declared(self, folder: Path) -> None:
        """Turn texts into lower case before they are tokenized if the files of sentence-transformers in `folder` say
        so. Raises ValueError for a tokenizer that cannot.
        """
        settings, path = transformer_settings(folder)
        if not settings.get("do_lower_case"):
            return
        if not isinstance(self._backend, tokenizers.Tokenizer):
            raise ValueError(f"{path}: do_lower_case is not supported for tokenizers without tokenizer.json")
        before = self._backend.normalizer
        lower = normalizers.Lowercase()
        self._backend.normalizer = lower if before is None else normalizers.Sequence([lower, before])

    # ---- ids and text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. Raises ValueError for unpaired surrogates, which UTF-8 cannot encode."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of each text. Raises as `encode` does."""
        try:
            return [
                encoding.ids
                for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            ]
        except TypeError as error:
            raise ValueError("the text is not valid Unicode: it has unpaired surrogates") from error

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], add_special_tokens: bool = True
    ) -> list[tuple[list[int], list[int | None], list[int]]]:
        """Return for each pair of texts, joined as the model expects: the ids; for each id the text it belongs to (0 or
        1, None for special tokens); and for each id its token type. Raises as `encode` does.
        """
        try:
            encodings = self._backend.encode_batch(list(pairs), add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise ValueError("the text is not valid Unicode: it has unpaired surrogates") from error
        return [(encoding.ids, encoding.sequence_ids, encoding.type_ids) for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of all ids together. Ids without a token add no text."""
        text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return clean_up_spaces(text) if self._clean_up else text

    def decode_characters(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the same without an incomplete character at the end, so that another text may continue it."""
        text = self.decode(ids, skip_special_tokens)
        if not text.endswith(REPLACEMENT):
            return text
        stream = self.stream((), skip_special_tokens)
        return stream.push(ids) + stream.finish()

    def stream(
        self,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        visible_ids: frozenset[int] = frozenset(),
    ):
        """Return a stream that decodes the tokens after `prompt_ids` as they arrive: `push(ids) -> str`, `finish() ->
        str`, which ends a text and leaves out an unfinished character, and `held`. `visible_ids` are not skipped.
        """
        hidden = self.special_ids - visible_ids if visible_ids else self.special_ids  # no copy per choice
        skip = hidden if skip_special_tokens else frozenset()
        raw_repeats = frozenset() if skip_special_tokens or spaces_between_special_tokens else self.added_ids
        stream = self._decoding.stream(prompt_ids, skip, raw_repeats)
        return CleanUpStream(stream) if self._clean_up else stream

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that the token adds in the middle of a text; several tokens may share one
        character.
        """
        content = self._added_texts.get(token_id)
        return self._decoding.token_bytes(token_id) if content is None else content.encode()

    def id_to_token(self, token_id: int) -> str:
        r"""Return the token's own text, as logprobs show it: bytes of an incomplete character are written like
        `\xf0\x9f`.
        """
        return self.token_bytes(token_id).decode("utf-8", "backslashreplace")

    def vocabulary_entry(self, token_id: int) -> str:
        """Return the token as spelled in the vocabulary (`Ġwor`, `▁wor`, `<0xE4>`); empty for an id without a token."""
        token = self._backend.id_to_token(token_id) or ""
        return token if isinstance(token, str) else token.decode("utf-8", "backslashreplace")

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, including added ones; the model's vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def breakers(self) -> BreakerIndex:
        tokens = (self.token_bytes(token_id) for token_id in range(self.vocab_size))
        return BreakerIndex(tokens, lambda texts: self.encode_batch(texts, False))

    @cached_property
    def max_token_chars(self) -> int:
        """Return the most characters of a token. A text with more characters per context position than this
        cannot fit into the context.
        """
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    # ---- chat

    def template(self, chat_template: str | None = None, tools: list[dict] | None = None) -> ChatTemplate:
        """Return the compiled `template_source`. Raises ValueError."""
        return compile_template(self.template_source(chat_template, tools))

    def template_source(self, chat_template: str | None = None, tools: list[dict] | None = None) -> str:
        """Return the template to use: `chat_template` (a name of one of the model's templates, or a text), else
        "tool_use" if there are tools, else "default".
        """
        templates = self.chat_templates
        if chat_template is not None:
            return templates.get(chat_template, chat_template)
        if tools is not None and "tool_use" in templates:
            return templates["tool_use"]
        if "default" in templates:
            return templates["default"]
        if templates:
            raise ValueError(
                "this model has several chat templates and no default: set chat_template to one of "
                f"{', '.join(sorted(templates))}"
            )
        raise ValueError(
            "this model has no chat template: set chat_template (--chat-template), or complete a text instead"
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
        documents: list[dict] | None = None,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text for a conversation; encode it with `add_special_tokens=False`. `variables` are further
        template variables with any names.

        Content may be text or a list of {"type": "text", "text": ...} parts, independent of the form the template
        takes. A template that does not belong to the model is untrusted and runs under limits (`chat_template.py`).
        Raises ValueError if the template refuses the input.
        """
        source = self.template_source(chat_template, tools)
        template = compile_template(source)
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **(variables or {})},
            limited=source not in self.chat_templates.values(),
        )


# ---- loading


def _load_fast(cls: type[Tokenizer], folder: Path) -> Tokenizer:
    config = read_object(folder / "tokenizer_config.json")
    if not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = config.pop("additional_special_tokens", None) or []  # its older name
    if "added_tokens_decoder" not in config:  # older folders keep parts of the configuration in separate files
        config.update(read_object(folder / "special_tokens_map.json"))
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises a plain Exception
        raise ValueError(f"{folder}/tokenizer.json cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    if _is_legacy_llama(backend, config, folder):
        _as_llama_tokenizer(backend, config)
    special_tokens = _add_special_tokens(backend, config, folder)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    # transformers cleans up only for WordPiece and similar types: cleanup would remove spaces from BPE text
    clean_up = bool(config.get("clean_up_tokenization_spaces", False)) and not isinstance(
        backend.model, tokenizers.models.BPE
    )
    return cls(
        backend,
        special_tokens,
        model_templates(folder, config),
        clean_up,
        _eos_token_ids(backend.token_to_id, special_tokens, folder),
    )


def _load_plamo(cls: type[Tokenizer], folder: Path) -> Tokenizer:
    config = plamo.with_defaults(read_object(folder / "tokenizer_config.json"))
    config |= {key: _text_of(value) for key, value in config.items() if key in NAMED_TOKENS}
    backend = plamo.PlamoTokenizer.load(folder / plamo.FILE, config)
    special = {name: config[name] for name in NAMED_TOKENS if backend.token_to_id(config.get(name) or "") is not None}
    ends = _eos_token_ids(backend.token_to_id, special, folder)
    return cls(backend, special, model_templates(folder, config), False, ends)


def _text_of(token: Json) -> str | None:
    """Return the text of a token from a configuration: a string, or a dict with flags."""
    return token["content"] if isinstance(token, Mapping) else token


def _added_token(token: Json) -> AddedToken:
    if not isinstance(token, Mapping):
        return AddedToken(token, special=True)
    flags = {key: value for key, value in token.items() if key not in ("content", "__type", "id")}
    return AddedToken(token["content"], **{"special": True, **flags})


def _add_special_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Add the special tokens that the configuration declares beyond tokenizer.json; return the named tokens."""
    entries = {
        int(token_id): _added_token({"special": False, **token})
        for token_id, token in config.get("added_tokens_decoder", {}).items()
    }
    if not entries:
        entries = _added_tokens_file(folder, config)
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    pending = [token for _, token in sorted(entries.items(), key=lambda item: item[0]) if repr(token) not in known]
    names = {token.content for token in (*backend.get_added_tokens_decoder().values(), *pending)}

    extra = config["extra_special_tokens"] or config.get("additional_special_tokens") or []
    named = {key: config[key] for key in NAMED_TOKENS if config.get(key) is not None}
    named |= {
        key: value
        for key, value in config.items()
        if key.endswith("_token") and key not in named and isinstance(_maybe_text(value), str)
    }
    if isinstance(extra, Mapping):
        named, extra = named | dict(extra), []
    for token in (*named.values(), *extra):
        if _text_of(token) not in names:
            pending.append(_added_token(token))
            names.add(_text_of(token))
    if pending:
        texts = {_text_of(token) for token in named.values()}
        for token in pending:
            token.special = token.special or token.content in texts
        backend.add_tokens(pending)
    return {name: _text_of(token) for name, token in named.items()}


def _maybe_text(value: Json) -> Any:
    return value.get("content") if isinstance(value, Mapping) else value


def _added_tokens_file(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    special = {_text_of(config[key]) for key in NAMED_TOKENS if config.get(key) is not None}
    special |= {_text_of(token) for token in config["extra_special_tokens"]}
    return {
        token_id: AddedToken(text, normalized=text not in special, special=text in special)
        for text, token_id in read_object(folder / "added_tokens.json").items()
    }


def _is_legacy_llama(backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> bool:
    """Return whether transformers replaces the pipeline in this tokenizer.json with the one of its LlamaTokenizer.

    It does so since version 5.
    """
    model_config = read_object(folder / "config.json")
    tokenizer_class = config.get("tokenizer_class") or model_config.get("tokenizer_class") or ""
    if (
        tokenizer_class.removesuffix("Fast") != "LlamaTokenizer"
        or "auto_map" in config
        or not isinstance(backend.model, tokenizers.models.BPE)
    ):
        return False
    pipeline = b"".join(part.__getstate__() for part in (backend.pre_tokenizer, backend.decoder) if part is not None)
    return model_config.get("model_type", "llama") == "llama" and b'"ByteLevel"' not in pipeline


def _as_llama_tokenizer(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Convert a tokenizer of Llama 1 and 2: put one space before the text, not before every stretch between special
    tokens as in tokenizer.json.
    """
    prefix = config.get("add_prefix_space")
    prefix = True if prefix is None else prefix
    scheme = "never" if not prefix else "always" if config.get("legacy", False) else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    model = backend.model
    model.fuse_unk, model.byte_fallback, model.dropout, model.unk_token = True, True, None, None
    for key, default in (("unk_token", "<unk>"), ("bos_token", "<s>"), ("eos_token", "</s>")):
        config.setdefault(key, default)


def _eos_token_ids(
    token_to_id: Callable[[str], int | None], special_tokens: Mapping[str, str], folder: Path
) -> list[int]:
    """Return the end token of the tokenizer, then the end tokens in the model's generation_config.json (else
    config.json).
    """
    eos = special_tokens.get("eos_token")
    ids = [token_to_id(eos)] if eos is not None else []
    declared = read_object(folder / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = read_object(folder / "config.json").get("eos_token_id")
    ids += declared if isinstance(declared, list) else [declared]
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _read_template(value: str) -> str:
    """Return the text of a template that is given as a file or as text."""
    if any(mark in value for mark in ("\n", "{%", "{{")):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except FileNotFoundError:
        reason = f"there is no file {value}, and it is not the text of a template"
    except OSError as error:
        reason = f"it is not the text of a template, and as a file: {error}"
    raise ValueError(f"chat_template: {reason}")


def _load_with_transformers(cls: type[Tokenizer], folder: Path, trust_remote_code: bool) -> Tokenizer:
    if not folder.is_dir():
        raise ValueError(f"tokenizer: there is no folder {folder}")
    if not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        raise ValueError(
            f"tokenizer: there are no tokenizer files in {folder} (tokenizer.json, for example): download them, "
            "or name another folder or "
            "Hub id with --tokenizer"
        )
    logger.info(
        "%s has no tokenizer.json: loading its tokenizer through transformers, which takes a few seconds", folder
    )
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # any type: the folder's files determine which code runs
        raise ValueError(f"no tokenizer can be loaded from {folder}: {error}") from error
    backend = getattr(slow, "backend_tokenizer", None) or _PythonTokenizer(slow)
    of_tokenizer = {} if slow.chat_template is None else {"chat_template": slow.chat_template}
    clean_up = (
        bool(slow.clean_up_tokenization_spaces)
        and isinstance(backend, tokenizers.Tokenizer)
        and not isinstance(backend.model, tokenizers.models.BPE)
    )
    return cls(
        backend,
        slow.special_tokens_map,
        model_templates(folder, of_tokenizer),
        clean_up,
        _eos_token_ids(backend.token_to_id, slow.special_tokens_map, folder),
    )


class _PythonTokenizer:
    """Adapts a transformers tokenizer written in Python to the interface of `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[_Encoding]:
        return [_Encoding(self._tokenizer.encode(text, add_special_tokens=add_special_tokens)) for text in texts]

    def encode_batch(self, pairs: list[tuple[str, str]], add_special_tokens: bool) -> list[_Encoding]:
        encodings = []
        for first, second in pairs:
            plain = [self._tokenizer.encode(text, add_special_tokens=False) for text in (first, second)]
            build, mask = self._tokenizer.build_inputs_with_special_tokens, self._tokenizer.get_special_tokens_mask
            if not add_special_tokens:
                encodings.append(_Encoding(plain[0] + plain[1], [0] * len(plain[0]) + [1] * len(plain[1])))
                continue
            texts = iter([0] * len(plain[0]) + [1] * len(plain[1]))
            sequence_ids = [None if special else next(texts) for special in mask(*plain)]
            encodings.append(_Encoding(build(*plain), sequence_ids))
        return encodings

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decoding(self) -> WindowDecoding:
        byte_level = self._tokenizer.get_vocab().keys() >= byte_alphabet().keys()
        return WindowDecoding(self.decode, self.id_to_token, byte_level)

    def id_to_token(self, token_id: int) -> str | bytes | None:
        return self._tokenizer.convert_ids_to_tokens(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.convert_tokens_to_ids(token)

    def get_vocab_size(self, with_added_tokens: bool) -> int:
        return len(self._tokenizer)

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        special = set(self._tokenizer.all_special_ids)
        added = {
            token_id: AddedToken(str(token), special=token_id in special)
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
        }
        return added | {
            i: AddedToken(self._tokenizer.convert_ids_to_tokens(i), special=True) for i in special if i not in added
        }


class _Encoding:
    def __init__(self, ids: list[int], sequence_ids: list[int | None] | None = None):
        self.ids, self.sequence_ids = ids, sequence_ids
