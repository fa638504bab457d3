"""Decide whether steps verify draft tokens, and which source drafts them, from `--speculative-config`, the model and
the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.configs.config import Config
from quire.configs.speculation import SpeculationSettings, read_speculation
from quire.worker.spec.model import ModelSpec, has_tensor

STEP_DRAFTS = 32  # drafts of all requests that a step may verify when their number adapts
ADAPTIVE_MAX = 16  # drafts of a request in a step without num_speculative_tokens


@dataclass(frozen=True, slots=True)
class Speculation:
    """The sources of drafts. `lookup`: (fewest, most) last tokens to look up in the request's own text, or None.

    If `num_draft` is None, the number of drafts adapts to their gain for the request.
    """

    prediction: bool = False
    grammar: bool = False
    lookup: tuple[int, int] | None = None
    num_draft: int | None = None
    by_match: bool = False  # no more drafts than tokens that matched
    model: str | None = None  # folder of a draft model, or of an EAGLE-3 head
    eagle: bool = False  # which of these it is
    heads: int = 0  # prediction heads of the checkpoint
    earlier: bool = False  # look up earlier texts of the same client, too

    @property
    def adapts(self) -> bool:
        """Return whether requests without a prediction have drafts, whose number is chosen by cost and gain."""
        return self.num_draft is None and self != Speculation(prediction=True)

    @property
    def max_drafts(self) -> int:
        """Return the most drafts of a request in a step."""
        return self.num_draft or ADAPTIVE_MAX

    @property
    def is_on(self) -> bool:
        return self.prediction or self.grammar or self.lookup is not None or self.model is not None or self.heads > 0


def resolve_speculation(
    config: Config, spec: ModelSpec, deterministic: bool
) -> tuple[Speculation, tuple[str, str, str]]:
    """Return the drafts of this server, and the entry (setting, value, reason) for the table of choices."""
    text = config.scheduler.speculative_config
    settings = read_speculation(text) if text is not None else SpeculationSettings()
    if settings.method == "none":
        return Speculation(), ("speculation", "none", "as asked")
    if settings.method == "mtp":
        count_heads(config, spec)
    if reason := _obstacle(config, spec):
        return Speculation(), ("speculation", "none", reason)
    if text is None and not deterministic:
        reason = (
            "only drafts from a request's `prediction`: without --deterministic the last bits of logits depend on the "
            "number of tokens in a step, so that drafts may change a text; --speculative-config turns them on"
        )
        return Speculation(prediction=True), ("speculation", "prediction", reason)
    reason = "as asked" if text is not None else "a text is the same with and without"
    if text is not None and not deterministic:
        reason += "; without --deterministic the last bits of logits depend on the number of tokens in a step"
    heads = _heads(settings.method, config, spec)
    speculation = replace(_choose_method(settings, heads), earlier=config.cache.enable_prefix_caching)
    return speculation, ("speculation", settings.method + "+mtp" * (settings.method == "auto" and heads > 0), reason)


def _heads(method: str, config: Config, spec: ModelSpec) -> int:
    """Return the number of prediction heads that a method uses; auto may use none."""
    if method not in ("mtp", "auto"):
        return 0
    try:
        return count_heads(config, spec)
    except ValueError:
        if method == "mtp":
            raise
        return 0


def _choose_method(settings: SpeculationSettings, heads: int) -> Speculation:
    match settings.method:
        case "ngram":
            high = settings.max_match or max(settings.min_match or 0, 5)
            low = settings.min_match or min(high, 3)
            return Speculation(True, False, (low, high), settings.num_draft)
        case "suffix":
            return Speculation(True, False, (1, 24), settings.num_draft, by_match=settings.num_draft is None)
        case "draft_model":
            return Speculation(True, False, None, settings.num_draft, model=settings.model)
        case "eagle3":
            return Speculation(True, False, None, settings.num_draft, model=settings.model, eagle=True)
        case "mtp":
            return Speculation(True, False, None, settings.num_draft, heads=heads)
        case "grammar":
            return Speculation(True, True, None, settings.num_draft)
    return Speculation(True, True, (1 if settings.num_draft else 3, 16), settings.num_draft, heads=heads)


def count_heads(config: Config, spec: ModelSpec) -> int:
    """Return the number of prediction heads that the checkpoint has one after another. Raises ValueError if it is 0."""
    name, folder = "--speculative-config: method mtp", config.model.model
    without = f"{name}: the model has no prediction head (MTP)"
    if spec.mtp is None:
        raise ValueError(f"{without}: config.json of {spec.architecture} names none")
    if (spec.raw.get("quantization_config") or {}).get("quant_method") == "gguf":
        return spec.mtp.count  # its tensors were looked for when config.json was made
    if config.model.load_format == "dummy":
        return spec.mtp.count
    names = dict(spec.mtp.names)
    joins = [names[f"mtp.{i}.fc"].removeprefix("model.") + ".weight" for i in range(spec.mtp.count)]
    found = next((i for i, join in enumerate(joins) if not has_tensor(folder, join)), len(joins))
    if not found:
        raise ValueError(f"{without}: its files have no tensor {joins[0]}")
    return found


def _obstacle(config: Config, spec: ModelSpec) -> str | None:
    """Return why steps cannot verify drafts, or None."""
    parallel = config.parallel
    if spec.is_encoder or not spec.has_lm_head:
        return "the model generates no text"
    if spec.crosses:
        return "the rules for what a speech recognizer writes are not followed by drafts"
    if parallel.pipeline_parallel_size > 1 and spec.has_states:
        return "not supported yet for models with recurrent states and several pipeline stages"
    return None
