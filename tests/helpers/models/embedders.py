"""Builds small random embedding models in the formats of sentence-transformers, the reference of their tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.helpers.models.checkpoints import build_checkpoint

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "engine",
    "Once upon a time there was a small engine that read a long book, word by word. " * 4,
    "Die Bäume wachsen über die Häuser, größer und schöner.",
    "What is the capital of France? The capital of France is Paris.",
]


def build_embedder(
    name: str, folder: Path, *, mode: str | None = "lasttoken", normalize: bool = True, **overrides: Any
) -> str:
    """Write the decoder `name` of `checkpoints.py` in the published form of embedding models: without output head and
    the prefix "model." of tensors, and with modules.json, unless `mode` is None.
    """
    import transformers

    source = folder.with_name(folder.name + "-lm")
    build_checkpoint(name, source, **overrides)
    model = transformers.AutoModel.from_pretrained(source)
    model.save_pretrained(folder)
    for path in source.glob("*token*"):
        shutil.copy(path, folder)
    end_with_eos(folder)
    if mode is not None:
        write_modules(folder, model.config.hidden_size, mode, normalize)
    return str(folder)


def build_classifier(folder: Path, labels: list[str], name: str = "qwen3", **overrides: Any) -> str:
    """Write the decoder `name` with a classifier in place of its output head."""
    import torch
    import transformers

    source = folder.with_name(folder.name + "-lm")
    build_checkpoint(name, source, **overrides)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=len(labels), id2label=dict(enumerate(labels)), pad_token_id=0
    )
    model.score.weight.data = torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(1)) / 8
    model.save_pretrained(folder)
    for path in source.glob("*token*"):
        shutil.copy(path, folder)
    end_with_eos(folder)
    return str(folder)


RERANK_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}<Instruct>: {{ message.content }}{% endif %}"
    "{% if message.role == 'query' %}<Query>: {{ message.content }}{% endif %}"
    "{% if message.role == 'document' %}<Document>: {{ message.content }}{% endif %}{% endfor %}<|im_end|>"
)


def build_reranker(folder: Path) -> str:
    """Write a language model that reranks by the logits of two tokens, with sentence-transformers' modules.json and a
    chat template for a query and a document.
    """
    build_checkpoint("qwen3", folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": RERANK_TEMPLATE}
    path.write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(RERANK_TEMPLATE)
    kinds = ["base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore"]
    modules = [
        {"idx": i, "name": str(i), "path": "1_LogitScore" if i else "", "type": f"sentence_transformers.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    config = {"model_type": "CrossEncoder", "prompts": {"web": "Judge by the web."}, "default_prompt_name": "web"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    formats = {"text": {"method": "forward", "method_output_name": "logits"}}
    formats["message"] = formats["text"] | {"format": "flat"}
    (folder / "sentence_bert_config.json").write_text(
        json.dumps(
            {
                "transformer_task": "text-generation",
                "modality_config": formats,
                "module_output_name": "causal_logits",
            }
        )
    )
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 100, "false_token_id": 200}))
    return str(folder)


def reference_logits(folder: str, prompts: list[list[int]]):
    """Return the logits of transformers' classifier for each prompt alone, `[n, num_labels]`."""
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([prompt])).logits for prompt in prompts])


def end_with_eos(folder: Path) -> None:
    """Make the tokenizer append a token to every text, as embedding models' tokenizers do."""
    from tokenizers import Tokenizer, processors

    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", pair="$A $B <|im_end|>", special_tokens=[("<|im_end|>", 2)]
    )
    tokenizer.save(str(path))


def write_modules(
    folder: Path, hidden_size: int, mode: str, normalize: bool = True, dense: tuple[tuple[int, int], ...] = ()
) -> None:
    """Write modules.json, the configuration of pooling with the switches of sentence-transformers before version 6, and
    random linear layers of the sizes `dense` (in, out).
    """
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [(f"{i}_Dense", "Dense") for i in range(2, 2 + len(dense))]
    modules += [(f"{len(modules)}_Normalize", "Normalize")] if normalize else []
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for i, (path, kind) in enumerate(modules)
            ]
        )
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": hidden_size, f"pooling_mode_{switch(mode)}": True})
    )
    for i, (size, out) in enumerate(dense, 2):
        _write_dense(folder / f"{i}_Dense", size, out)


def _write_dense(folder: Path, size: int, out: int) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    activation = {"activation_function": "torch.nn.modules.linear.Identity"}
    (folder / "config.json").write_text(
        json.dumps({"in_features": size, "out_features": out, "bias": False} | activation)
    )
    weight = torch.randn(out, size, generator=torch.Generator().manual_seed(size)) / 8
    save_file({"linear.weight": weight}, folder / "model.safetensors")


def switch(mode: str) -> str:
    return {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "weightedmean": "weightedmean_tokens"}.get(
        mode, mode
    )


def reference_embeddings(folder: str, texts: list[str], dtype: str = "float32"):
    """Return sentence-transformers' embeddings, `[n, D]` float32."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"torch_dtype": getattr(torch, dtype)})
    return model.encode(texts, convert_to_tensor=True).float()
