"""`quire quantize`: convert a floating-point checkpoint to a quantized one, layer by layer."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.quantize.formats import Format, Quantized, choose_format
from quire.worker.quantize.gptq import Observer, gptq
from quire.worker.quantize.stages import Texts, load_stage
from quire.worker.quantize.weights import Plain, Weight, find_weights
from quire.worker.quantize.writer import SHARD_BYTES, ShardWriter
from quire.worker.spec.index import without_indexes
from quire.worker.spec.model import ModelSpec, read_config
from quire.worker.transformer.decoder import CausalLM
from quire.worker.weights.checkpoint import Checkpoint
from quire.worker.weights.loader import placements_of

logger = logging.getLogger("quire.quantize")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


@dataclass(frozen=True, slots=True)
class Settings:
    format: str  # int4, int8, w8a8 or fp8
    method: str  # rtn or gptq
    group_size: int | None = None
    act_order: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    format: Format
    num_weights: int  # tensors quantized
    bits_before: float  # per parameter of the checkpoint, unquantized ones included
    bits_after: float
    num_bytes: int
    unseen: int  # weights rounded to nearest because no text reached their expert
    perplexity: tuple[float, float] | None  # before and after


def quantize_checkpoint(
    folder: str,
    out: Path,
    settings: Settings,
    texts: tuple[torch.Tensor, torch.Tensor] | None,
    progress: Callable[[float], None] | None = None,
) -> Report:
    """Write the model in `folder`, quantized, to the empty folder `out`. `texts` are token ids to calibrate GPTQ with,
    and others to measure the perplexity on, each `[num, length]`. `progress` is called with the fraction of layers
    that are done.

    Raises:
        ValueError: the model or a setting is not supported.
    """
    # calibration attends to all keys; the tensors of indexes are copied
    spec = without_indexes(read_model_spec(folder, images=False))
    if spec.raw.get("quantization_config") or spec.raw.get("compression_config"):
        raise ValueError(f"the weights in {folder} are quantized already; give the original model")
    if spec.implementation != "quire":
        raise ValueError(f"{spec.architecture}: only families that quire has a file for can be quantized")
    with torch.inference_mode(), Checkpoint(folder) as checkpoint:
        job = _Job(spec, folder, out, settings, checkpoint)
        perplexity = job.quantize_layers(texts, progress)
        job.copy_others()
        job.writer.finish()
        _copy_files(Path(folder), out)
        config = read_config(folder) | {"quantization_config": job.config()}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")  # last: now it loads
        return job.report(perplexity)


class _Job:
    def __init__(self, spec: ModelSpec, folder: str, out: Path, settings: Settings, checkpoint: Checkpoint):
        self.spec, self.folder, self.settings, self.checkpoint = spec, folder, settings, checkpoint
        model = build_model(spec, torch.float32, torch.device("meta"), max_model_len=1, weights=Plain())
        self.names = model.tensor_names(checkpoint.position)
        checkpoint.check(placements_of(model, self.names, checkpoint), model, spec, self.names)
        self.weights = find_weights(model, self.names, checkpoint)
        if not self.weights:
            raise ValueError(f"{spec.architecture} has no projections to quantize")
        columns = {name: weight.layer.in_features for name, weight in self.weights.items()}
        self.format = choose_format(settings.format, columns, settings.group_size, getattr(torch, spec.dtype))
        self.writer, self.unseen = ShardWriter(out, SHARD_BYTES), 0

    def quantize_layers(
        self, texts: tuple[torch.Tensor, torch.Tensor] | None, progress: Callable[[float], None] | None
    ) -> tuple[float, float] | None:
        """Quantize all layers. Returns the perplexities before and after, if there are texts."""
        passes = _Passes(self, *texts) if texts else None
        for index in range(self.spec.num_hidden_layers):
            start = time.monotonic()
            if progress is not None:
                progress(index / self.spec.num_hidden_layers)
            mine = {name: w for name, w in self.weights.items() if self.names.layer(name) == index}
            quantized, error = passes.layer(index) if passes else self.quantize_all(mine, self.nearest)
            for name, weight in quantized.items():
                self.writer.add(self.format.tensors(name, weight))
            logger.info(
                "layer %d of %d: %d weights, relative error %.4f, %.1f s",
                index + 1, self.spec.num_hidden_layers, len(quantized), error, time.monotonic() - start,
            )  # fmt: skip
        return passes.perplexity() if passes else None

    def nearest(self, weight: Weight, value: torch.Tensor) -> Quantized:
        return self.format.nearest(value)

    def quantize_all(
        self, weights: dict[str, Weight], method: Callable[[Weight, torch.Tensor], Quantized]
    ) -> tuple[dict[str, Quantized], float]:
        """Return the weights by `method`, and their error relative to their size; layers that are loaded get the new
        ones.
        """
        found, wrong, size = {}, 0.0, 0.0
        for name, weight in weights.items():
            value = weight.read(self.checkpoint).float()
            found[name] = method(weight, value)
            rounded = found[name].dequantized()
            wrong += float((rounded - value).square_().sum())
            size += float(value.square().sum())
            if weight.layer.weight.device.type != "meta":
                weight.replace(rounded)
        return found, (wrong / size) ** 0.5 if size else 0.0

    def copy_others(self) -> None:
        """Copy the tensors that are not quantized."""
        used = {weight.source.name for weight in self.weights.values()}
        for name in sorted(self.checkpoint.position, key=self.checkpoint.position.get):
            if name not in used:
                self.writer.add({name: self.checkpoint.tensor(name)})

    def config(self) -> dict:
        """Return the `quantization_config`: linear layers that are not quantized are named."""
        used = {weight.source.name for weight in self.weights.values()}
        ignored = [
            name.removesuffix(".weight")
            for name in self.checkpoint.position
            if name not in used and name.endswith(".weight") and len(self.checkpoint.shape(name)) == 2
        ]
        by_gptq = self.settings.method == "gptq"
        return self.format.config(
            sorted({*ignored, "lm_head"} - {name for name in ignored if "embed" in name.split(".")[-1]}),
            act_order=by_gptq and self.settings.act_order,
        )

    def report(self, perplexity: tuple[float, float] | None) -> Report:
        before = sum(self.checkpoint.tensor(name).nbytes for name in self.checkpoint.position)
        count = sum(self.checkpoint.tensor(name).numel() for name in self.checkpoint.position)
        after = self.writer.num_bytes
        return Report(
            self.format, len(self.weights), 8 * before / count, 8 * after / count, after, self.unseen, perplexity
        )


class _Passes:
    """The texts on their way through the layers: `calibration` and `after` through quantized ones, `before` not."""

    def __init__(self, job: _Job, calibration: torch.Tensor, held: torch.Tensor):
        self.job, self.last = job, None
        self.calibration = Texts(calibration) if job.settings.method == "gptq" else None
        self.before, self.after = Texts(held), Texts(held)

    def layer(self, index: int) -> tuple[dict[str, Quantized], float]:
        """Quantize layer `index`."""
        job = self.job
        self.last = stage = load_stage(job.spec, job.folder, index)
        weights = find_weights(stage, job.names, job.checkpoint)
        self.before = self.before.run(stage)
        method = self._observed(stage, weights) if self.calibration else job.nearest
        quantized, error = job.quantize_all(weights, method)
        if self.calibration:
            self.calibration = self.calibration.run(stage)
        self.after = self.after.run(stage)
        return quantized, error

    def _observed(self, stage: CausalLM, weights: dict[str, Weight]) -> Callable[[Weight, torch.Tensor], Quantized]:
        """Return GPTQ with the inputs of each layer."""
        job = self.job
        layers = {id(weight.layer): weight.layer for weight in weights.values()}
        observers = {key: Observer(layer.method) for key, layer in layers.items()}
        for key, layer in layers.items():
            layer.method = observers[key]
        self.calibration.run(stage)
        for key, layer in layers.items():
            layer.method = observers[key].method

        def method(weight: Weight, value: torch.Tensor) -> Quantized:
            observer = observers[id(weight.layer)]
            if observer.hessian is None:
                job.unseen += 1
                return job.nearest(weight, value)
            return gptq(value, observer.hessian / observer.num_rows, job.format, job.settings.act_order)

        return method

    def perplexity(self) -> tuple[float, float]:
        return self.before.perplexity(self.last), self.after.perplexity(self.last)


def _copy_files(folder: Path, out: Path) -> None:
    """Copy tokenizer, templates and the like."""
    for path in folder.iterdir():
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, out / path.name)
