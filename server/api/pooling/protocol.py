"""The bodies of /score, /rerank, /classify and /pooling: vLLM's, Jina's and Cohere's names where they agree."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.server.http.vectors import Prompts, VectorFields, VectorUsage
from quire.server.request.limits import MAX_PROMPTS, Text

Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_PROMPTS)]


class Document(msgspec.Struct):
    text: Text

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}


Documents = Annotated[list[Text | Document], Meta(min_length=1, max_length=MAX_PROMPTS)]


class ScoreRequest(VectorFields, kw_only=True):
    """POST /v1/score: every pair of `text_1` and `text_2`, of which the first may be one text for all."""

    text_1: Text | Texts | None = None
    text_2: Text | Texts | None = None
    queries: Text | Texts | None = None  # another name of text_1
    documents: Text | Texts | None = None  # another name of text_2
    use_activation: bool | None = None  # false: the classifier's logits


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage


class RerankRequest(VectorFields, kw_only=True):
    """POST /v1/rerank, /v2/rerank"""

    query: Text
    documents: Documents
    top_n: Annotated[int, Meta(ge=0, le=2**31)] | None = None  # default: all; 0 is all too
    return_documents: bool | None = None  # default: true
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=2**31)] | None = None  # Cohere's name of truncate_prompt_tokens
    use_activation: bool | None = None

    unsupported: ClassVar[dict[str, tuple]] = VectorFields.unsupported | {"rank_fields": (["text"],)}


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankList(msgspec.Struct, kw_only=True):
    id: str
    model: str
    results: list[RerankResult]  # the most relevant first
    usage: VectorUsage


class ClassifyRequest(VectorFields, kw_only=True):
    """POST /classify"""

    input: Text | Prompts
    use_activation: bool | None = None  # false: the logits


class Classification(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: VectorUsage


class PoolingRequest(VectorFields, kw_only=True):
    """POST /pooling: embeddings, or a classifier's outputs, as plain vectors."""

    input: Text | Prompts
    task: Literal["embed", "classify", "token_classify"] | None = None  # default: the model's task
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


class PooledData(msgspec.Struct):
    index: int
    data: list[float | list[float]] | str  # lists: of a classifier of tokens, per token
    object: str = "pooling"


class PoolingList(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PooledData]
    usage: VectorUsage
