"""Bounds of request parameters, in any dialect. The annotated types carry them into parsers and OpenAPI."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from quire.configs.media_limits import MAX_FPS, MAX_FRAMES

INT64_MAX = 2**63 - 1
MAX_N = 128
MAX_TEXT = 2**24  # characters of any text; --max-body-size is usually the lower limit
MAX_IDS = 2**22  # token ids of a prompt; the context length is usually the lower limit
MAX_PROMPTS = 2048
MAX_CHOICES = 16384  # prompts times n
MAX_STOP, MAX_STOP_CHARS = 64, 256
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 256, 128
MAX_CHOSEN_IDS = 2**14  # entries of allowed_token_ids, and of logit_bias
MAX_IMAGE_CHARS = 2**28
MAX_TEMPLATE = 2**18  # characters of a chat template
MAX_TEMPLATE_KWARGS, MAX_TEMPLATE_KWARGS_BYTES = 64, 2**16

Int64 = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
NonNegative = Annotated[int, Meta(ge=0, le=INT64_MAX)]
AtLeastMinusOne = Annotated[int, Meta(ge=-1, le=INT64_MAX)]
Count = Annotated[int, Meta(ge=1, le=MAX_N)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.001, le=1000)]
TypicalP = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Sigmas = Annotated[float, Meta(ge=-1, le=1000, description="-1 and 0: off")]
DryMultiplier = Annotated[float, Meta(ge=0, le=100, description="0: off")]
DryBase = Annotated[float, Meta(ge=1, le=100)]
LastTokens = Annotated[int, Meta(ge=-1, le=INT64_MAX, description="-1: all; 0: none")]
Breaker = Annotated[str, Meta(min_length=1, max_length=40)]
Breakers = Annotated[list[Breaker], Meta(max_length=16)]
Mirostat = Annotated[int, Meta(ge=0, le=2, description="0: off")]
MirostatTau = Annotated[float, Meta(gt=0, le=100, description="surprise to hold, in bits")]
MirostatEta = Annotated[float, Meta(gt=0, le=10)]
DynatempRange = Annotated[float, Meta(ge=0, le=10)]
DynatempExponent = Annotated[float, Meta(gt=0, le=100)]
SamplerName = Annotated[str, Meta(min_length=1, max_length=40)]
Samplers = Annotated[list[SamplerName], Meta(max_length=16)] | Annotated[str, Meta(max_length=16)]
MinKeep = Annotated[int, Meta(ge=0, le=2**14)]
Bias = Annotated[float, Meta(ge=-1e6, le=1e6, description="values beyond -100 and 100 count as -100 and 100")]
# an image by URL or as base64; --max-body-size is usually the lower limit
ImageText = Annotated[str, Meta(min_length=1, max_length=MAX_IMAGE_CHARS)]
ImageName = Annotated[str, Meta(min_length=1, max_length=256)]
ProcessorOption = bool | Int64 | Annotated[float, Meta(ge=-1e300, le=1e300)] | Annotated[str, Meta(max_length=64)]
ProcessorOptions = Annotated[
    dict[
        Annotated[str, Meta(max_length=64)],
        ProcessorOption | Annotated[dict[Annotated[str, Meta(max_length=64)], ProcessorOption], Meta(max_length=16)],
    ],
    Meta(max_length=32),
]
Frames = Annotated[int, Meta(ge=-1, le=MAX_FRAMES, description="-1: as many as the server takes")]
FramesPerSecond = Annotated[float, Meta(ge=-1, le=MAX_FPS, description="-1: as many as the server takes")]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
TokenId = Annotated[int, Meta(ge=0, le=INT64_MAX)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_IDS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Meta(max_length=MAX_STOP)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
BadWords = Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)]
AllowedTokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_CHOSEN_IDS)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")]
Template = Annotated[str, Meta(max_length=MAX_TEMPLATE)]
