"""Segments as subtitles: SubRip and WebVTT."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.generate.transcription import Segment


def srt(segments: Sequence[Segment]) -> str:
    """Return SubRip: numbered, with a comma before the milliseconds."""
    parts = [f"{number}\n{_times(one, ',')}\n{_line(one)}\n" for number, one in enumerate(segments, 1)]
    return "\n".join(parts)


def vtt(segments: Sequence[Segment]) -> str:
    """Return WebVTT."""
    return "\n".join(["WEBVTT\n", *(f"{_times(one, '.')}\n{_line(one)}\n" for one in segments)])


def _line(segment: Segment) -> str:
    # an arrow would begin a new cue
    return segment.text.strip().replace("-->", "->")


def _times(segment: Segment, mark: str) -> str:
    return f"{_time(segment.start, mark)} --> {_time(segment.end, mark)}"


def _time(seconds: float, mark: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, whole = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{whole:02}{mark}{thousandths:03}"
