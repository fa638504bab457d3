"""The perplexity of the embedded model in every format that the repository can write: the assistant's words of held-out
conversations, with plain torch; then, with the native CPU kernels, by activations of 16 and of 8 bits.

    python -m benchmarks.perplexity

Also calibrates GPTQ, with conversations that are neither in the training data nor among those that are measured.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import gguf
import torch
from tokenizers import Tokenizer

from quire.checkpoints.gguf.folder import write_folder
from quire.checkpoints.gguf.header import read_gguf
from quire.configs.sources import embedded_model
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cpu.native import KERNELS
from quire.worker.models.registry import build_model, num_parameters, read_model_spec
from quire.worker.quantize.run import Settings, quantize_checkpoint
from quire.worker.quantize.stages import Texts, cut
from quire.worker.weights.loader import load_weights
from tests.helpers.models.gguf_files import write_gguf
from tests.helpers.models.tiny_conversations import NUM_MEASURED, tiny_conversations

Conversations = list[tuple[list[int], list[bool]]]  # token ids, and whether the assistant wrote each
CALIBRATION, LENGTH = 200, 256


@torch.inference_mode()
def perplexity(folder: str, texts: Conversations, quantization: str | None = None) -> float:
    spec = read_model_spec(folder)
    model = build_model(spec, torch.bfloat16, torch.device("cpu"), quantization=quantization)
    load_weights(model, spec, folder)
    surprise, count = 0.0, 0
    for ids, by_assistant in texts:
        tokens = torch.tensor(ids[: spec.max_model_len])
        logprobs = model.logits(Texts(tokens[None]).run(model).hidden[0]).log_softmax(-1)[:-1]
        learnt = torch.tensor(by_assistant[1 : len(tokens)])
        surprise -= float(logprobs.gather(1, tokens[1:, None])[learnt].sum())
        count += int(learnt.sum())
    return float(torch.tensor(surprise / count).exp())


@torch.inference_mode()
def native_logprobs(folder: str, texts: Conversations, bits: int, quantization: str | None = None) -> torch.Tensor:
    """Return log-probabilities `[T, V]` of every position, by the native kernels with activations of `bits` bits."""
    KERNELS.activation_bits = bits
    spec = read_model_spec(folder)
    model = build_model(spec, torch.bfloat16, torch.device("cpu"), quantization=quantization, ops=CpuPlatform().ops)
    load_weights(model, spec, folder)
    rows = [torch.tensor(ids[: spec.max_model_len]) for ids, _ in texts]
    return torch.cat([model.logits(Texts(row[None]).run(model).hidden[0]).log_softmax(-1)[:-1] for row in rows])


def compare_activations(name: str, folder: str, texts: Conversations, quantization: str | None = None) -> None:
    """Show the perplexity of all words, users' included, with 16 and 8 bits, and the divergence of the two."""
    exact, rounded = (native_logprobs(folder, texts, bits, quantization) for bits in (16, 8))
    longest = read_model_spec(folder).max_model_len
    following = torch.cat([torch.tensor(ids[1:longest]) for ids, _ in texts])[:, None]
    words = [float((-logprobs.gather(1, following).mean()).exp()) for logprobs in (exact, rounded)]
    divergence = float((exact.exp() * (exact - rounded)).sum(-1).mean())
    print(
        f"{name:<34} perplexity of all words {words[0]:.4f} (16 bits) {words[1]:.4f} (8 bits), "
        f"divergence {divergence:.1e}",
        flush=True,
    )


def main() -> None:
    folder = embedded_model()
    tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    texts = tiny_conversations(tokenizer)
    ids = [token for one, _ in tiny_conversations(tokenizer, NUM_MEASURED, CALIBRATION) for token in one]
    calibration = cut(ids, LENGTH, 128, None)
    weights = num_parameters(read_model_spec(folder))

    def show(name: str, model: str, num_bytes: int | None, quantization: str | None = None) -> None:
        bits = f"{8 * num_bytes / weights:5.2f}" if num_bytes else "    -"
        print(
            f"{name:<34} {bits} bits per weight   perplexity {perplexity(model, texts, quantization):.4f}", flush=True
        )

    show("bfloat16", folder, os.path.getsize(Path(folder, "model.safetensors")))
    for name in ("int8", "int4"):
        show(f"--quantization {name}", folder, None, name)
    with tempfile.TemporaryDirectory() as work:
        for form in ("int8", "w8a8", "fp8", "int4"):
            for method in ("rtn", "gptq"):
                out = Path(work, f"{form}-{method}")
                out.mkdir()
                report = quantize_checkpoint(folder, out, Settings(form, method), calibration)
                show(f"quire quantize {form}, {method}", str(out), report.num_bytes)
        for kind in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4"):
            show(f"GGUF {kind}", *in_gguf(folder, Path(work, kind), kind))
        if KERNELS.load(background=False):
            for name in ("int8", "int4"):
                compare_activations(f"--quantization {name}", folder, texts, name)
            for kind in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4"):
                compare_activations(f"GGUF {kind}", str(Path(work, kind, "as-folder")), texts)


def in_gguf(folder: str, work: Path, kind: str) -> tuple[str, int]:
    """Return (the folder made of a GGUF file of the model, the bytes of its tensors)."""
    shutil.copytree(folder, work)
    file = work / "model.gguf"
    write_gguf(str(work), file, {"default": kind}, "qwen3")
    write_folder(read_gguf(file), work / "as-folder")
    return str(work / "as-folder"), sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)


if __name__ == "__main__":
    main()
