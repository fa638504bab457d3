"""Decodes one video: a program that a process of its own runs, so that a hostile file ends this process alone.

Standard input is the file. The argument is JSON: `format` (FFmpeg's name), `indices` of the frames or null,
`max_pixels` of a frame, `memory` in bytes and `seconds` of CPU time. Standard output is a line of JSON with the facts
about the video, and for each index, ascending, the pixels of the frame as RGB rows. An error is the line
{"error": ...}. If fewer frames can be decoded than `indices` name, the output ends with the frames that there are, and
their total number as JSON, after a line break.

It imports nothing of this package: it starts in a fifth of a second.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import av
import av.error

# each decoder is code that strangers reach
CODECS = {
    *("av1", "ffv1", "flv", "flv1", "gif", "h263", "h264", "hevc", "libdav1d", "libvpx", "libvpx-vp9", "mjpeg"),
    *("mpeg1video", "mpeg2video", "mpeg4", "png", "prores", "rawvideo", "theora", "vp6f", "vp8", "vp9", "wmv2"),
}
_ATTACHED_PICTURE = 0x400  # disposition of a cover


class Refused(Exception):
    """The video cannot be used; the text is the end of a sentence."""


def limit(memory: int, seconds: int) -> None:
    """Bound the process by the operating system, where it can."""
    os.nice(10)
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere address space is not memory
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def open_video(format_name: str) -> tuple[av.container.InputContainer, av.video.stream.VideoStream]:
    """Return the container and its first moving picture. The demuxer is named, because FFmpeg takes some texts for
    lists of files that it would open.
    """
    sys.stdin.buffer.seek(0)
    container = av.open(sys.stdin.buffer, format=format_name, metadata_errors="ignore")
    streams = [one for one in container.streams.video if not int(one.disposition) & _ATTACHED_PICTURE]
    if not streams:
        raise Refused("it has no video stream")
    stream = streams[0]
    if stream.codec_context is None or stream.codec_context.name not in CODECS:
        name = getattr(stream.codec_context, "name", None) or "unknown"
        raise Refused(f"its codec, {name}, is not supported")
    stream.thread_type = "SLICE"
    stream.codec_context.thread_count = 2
    return container, stream


def decoded(container: av.container.InputContainer, stream: av.video.stream.VideoStream) -> Iterator[av.VideoFrame]:
    """Yield the frames in the order in which they are shown. A packet that cannot be decoded is left out."""
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except av.error.FFmpegError:  # the file is cut off
            packet = None
        try:
            yield from stream.decode(packet)
        except av.error.EOFError:
            return
        except av.error.InvalidDataError:
            pass
        if packet is None or (packet.dts is None and packet.size == 0):
            return


def count_packets(format_name: str) -> int:
    """Return the number of the video's packets, for containers that do not name it."""
    container, stream = open_video(format_name)
    count = 0
    try:
        for packet in container.demux(stream):
            count += packet.size > 0
    except av.error.FFmpegError:  # the file is cut off
        pass
    return count


def pixels(frame: av.VideoFrame, width: int, height: int) -> memoryview:
    """Return the frame as RGB rows, not yet turned."""
    rgb = frame.reformat(width=width, height=height, format="rgb24")
    plane = rgb.planes[0]
    view, stride, row = memoryview(plane), plane.line_size, 3 * width
    if stride == row:
        return view[: row * height]
    return memoryview(b"".join(view[i * stride : i * stride + row] for i in range(height)))


def describe(stream: av.video.stream.VideoStream, frame: av.VideoFrame, num_frames: int) -> dict[str, object]:
    """Return the facts: size of the stored frames, how they are turned, number of frames and frames per second."""
    rate = stream.average_rate or stream.guessed_rate or stream.base_rate
    return {
        "width": frame.width,
        "height": frame.height,
        "turn": int(frame.rotation) % 360,
        "num_frames": num_frames,
        "fps": float(rate) if rate else None,
    }


def run(order: dict[str, object]) -> None:
    """Write the facts and the frames of `indices`."""
    out, indices = sys.stdout.buffer, order["indices"]
    container, stream = open_video(order["format"])
    num_frames = stream.frames
    if not num_frames:
        num_frames = count_packets(order["format"])
        container, stream = open_video(order["format"])
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > (most := order["max_pixels"]):
        raise Refused(f"its frames have {width} x {height} pixels, more than {most} (--max-image-pixels)")
    frames = decoded(container, stream)
    first = next(frames, None)
    if first is None:
        raise Refused("it has no frame that can be decoded")
    if first.width * first.height > most:
        raise Refused(f"its frames have more than {most} pixels (--max-image-pixels)")
    facts = describe(stream, first, max(1, num_frames))
    out.write(json.dumps(facts).encode() + b"\n")
    if indices is not None:
        _write_frames(out, first, frames, indices)
    out.flush()


def _write_frames(out, first: av.VideoFrame, frames: Iterator[av.VideoFrame], indices: list[int]) -> None:
    wanted, width, height = iter(indices), first.width, first.height
    following, frame, count = next(wanted, None), first, 0
    while frame is not None and following is not None:
        while following == count:
            out.write(pixels(frame, width, height))
            following = next(wanted, None)
        count, frame = count + 1, next(frames, None)
    if following is not None:
        out.write(b"\n" + json.dumps({"num_frames": count}).encode())


def main() -> None:
    order = json.loads(sys.argv[1])
    limit(order["memory"], order["seconds"])
    try:
        run(order)
    except Refused as error:
        _refuse(str(error))
    except (av.error.FFmpegError, ValueError) as error:
        _refuse(f"it cannot be decoded: {getattr(error, 'strerror', None) or error}"[:200])
    except MemoryError:
        _refuse("decoding it takes too much memory")


def _refuse(why: str) -> None:
    sys.stdout.buffer.write(json.dumps({"error": why}).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
