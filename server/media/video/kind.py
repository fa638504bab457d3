"""Videos, by the model's `VideoProcessor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quire.configs.serving import MediaConfig
from quire.server.errors import NotInstalled
from quire.server.media.inputs import MediaInput
from quire.server.media.kinds import Group, KindBase
from quire.server.media.loading.contents import Content, present, refused
from quire.server.turns.fair_queue import Turns

if TYPE_CHECKING:
    from quire.server.media.processor import ProcessedVideo
    from quire.server.media.video.processor import VideoFacts, VideoProcessor
    from quire.server.media.video.sources import Source

_NUM_THREADS = 2  # that wait for decoders and resize frames
_MAX_BYTES = 2**30  # for videos while they are preprocessed, all together
_FRAMES_HELD = 8  # decoded frames in pipes and on the way, in the memory of this process


class VideoKind(KindBase):
    """Videos. They have threads of their own, so that a long one delays no image."""

    name = "video"

    def __init__(self, processor: VideoProcessor, token_id: int, config: MediaConfig, defaults: dict[str, Any]):
        """Keep `defaults`, the server's mm_processor_kwargs."""
        super().__init__(Turns(_NUM_THREADS, per_tenant=1, max_bytes=_MAX_BYTES), _NUM_THREADS)
        self._processor, self.token_id, self._config = processor, token_id, config
        self.placeholder, self.token, self.options = processor.placeholder, processor.token, processor.options
        self.defaults = {name: value for name, value in defaults.items() if name in self.options}

    def groups(self, inputs: list[MediaInput]) -> list[list[MediaInput]]:
        return [[one] for one in inputs]

    def detail(self, inputs: Sequence[MediaInput]) -> dict[str, Any]:
        return {}

    def check_defaults(self) -> None:
        try:
            self._processor.most_tokens(self.defaults)
        except ValueError as error:
            raise ValueError(f"--media-io-kwargs or --mm-processor-kwargs: {error}") from None

    def measure(self, group: Group) -> None:
        (video,), (content,) = group.inputs, group.content
        with self._explained(video), self._source(video, content) as source:
            group.num_tokens = self._processor.num_tokens(source.facts, group.options)
            if group.enlarges and not self.may_enlarge:
                usual = self._processor.num_tokens(source.facts, self.defaults)
                self.check_most(group.num_tokens, max(usual, self._processor.most_tokens(self.defaults)), group.param)
            group.num_bytes = self._num_bytes(source.facts, group.num_tokens)

    def _num_bytes(self, facts: VideoFacts, num_tokens: int) -> int:
        frames = _FRAMES_HELD * 3 * facts.width * facts.height
        return frames + 2 * num_tokens * self._processor.bytes_per_token

    def process(self, group: Group) -> list[ProcessedVideo]:
        from quire.server.media.video.sources import Shorter

        (video,), (content,) = group.inputs, group.content
        with self._explained(video), self._source(video, content) as source:
            try:
                return [self._run(source, source.facts, group.options)]
            except Shorter as found:
                return [self._run(source, found.facts, group.options)]

    def _run(self, source: Source, facts: VideoFacts, options: dict[str, Any]) -> ProcessedVideo:
        indices = self._processor.indices(facts, options)
        return self._processor(facts, indices, source.frames(indices), options)

    @contextmanager
    def _source(self, video: MediaInput, content: Content | None) -> Iterator[Source]:
        from quire.server.media.video.sources import FileSource, ImageSource

        if video.picture is not None:
            source = video.picture
        elif isinstance(found := present(video, content), list):
            source = ImageSource(found, self._config)
        else:
            source = FileSource(found, self._config)
        try:
            yield source
        finally:
            source.close()

    @contextmanager
    def _explained(self, video: MediaInput) -> Iterator[None]:
        try:
            yield
        except ModuleNotFoundError as error:
            raise NotInstalled(f"{video.param}: {error.msg}.", param=video.param) from None
        except ValueError as error:
            raise refused(video, str(error)) from None
