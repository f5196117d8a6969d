"""Video files as phones, cameras and screen recorders write them: pixels that are not square, frames of uneven length,
colours of HDR."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sfumato.data.media.video_files import examine_video
from sfumato.data.media.videos import check_video, frames_at, read_frames
from sfumato.data.sounds.video_sound import VideoSoundDataset
from sfumato.errors import DataError
from tests.unit.test_video_with_sound import dataset_of

av = pytest.importorskip("av")
pytest.importorskip("cv2")


def write_shades(path: Path, times: Sequence[int], **settings: Any) -> Path:
    """A video of 64 x 48 pixels: frames that are shown from some milliseconds on, each 10 levels brighter."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(25))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for name, value in settings.items():
            setattr(stream.codec_context, name, value)
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def shades(path: Path, count: int) -> list[int]:
    """Which frames of ``write_shades`` are read."""
    return [round(float(np.asarray(frame).mean()) / 10) for frame in read_frames(path, count, "row 1")]


@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi"])
@pytest.mark.parametrize(("ratio", "size"), [((32, 27), (76, 48)), ((3, 4), (64, 64)), ((1, 1), (64, 48))])
def test_pixels_are_made_square(kind: str, ratio: tuple[int, int], size: tuple[int, int], tmp_path: Path) -> None:
    path = write_shades(tmp_path / f"a.{kind}", range(0, 200, 40), sample_aspect_ratio=Fraction(*ratio))
    for source in (path, path.read_bytes()):
        assert [frame.size for frame in read_frames(source, 2, "row 1")] == [size, size]


def test_a_turned_video_is_upright_with_square_pixels(tmp_path: Path) -> None:
    path = write_shades(tmp_path / "a.mp4", range(0, 200, 40), sample_aspect_ratio=Fraction(3, 2))
    content = bytearray(path.read_bytes())
    matrix = content.find(b"tkhd") + 44  # of the head of its track (ISO 14496-12)
    assert struct.unpack_from(">9i", content, matrix)[8] == 1 << 30
    struct.pack_into(">9i", content, matrix, 0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30)
    assert read_frames(bytes(content), 1, "row 1")[0].size == (48, 96)
    struct.pack_into(">9i", content, matrix, -(1 << 16), 0, 0, 0, 1 << 16, 0, 64 << 16, 0, 1 << 30)
    with pytest.raises(DataError, match=r"is shown mirrored, which is not done here: write it anew as it is shown"):
        read_frames(bytes(content), 1, "row 1")  # OpenCV would turn it upside down


def test_an_absurd_pixel_is_refused(tmp_path: Path) -> None:
    path = write_shades(tmp_path / "a.mp4", range(0, 200, 40), sample_aspect_ratio=Fraction(5, 1))
    with pytest.raises(DataError, match="it says that a pixel is 5 times as wide as high"):
        read_frames(path, 2, "row 1")


@pytest.mark.parametrize(("primaries", "transfer"), [(9, 18), (9, 16), (12, 1)])
def test_colours_of_hdr_and_wider_ranges_are_refused(primaries: int, transfer: int, tmp_path: Path) -> None:
    path = write_shades(
        tmp_path / "a.mp4", range(0, 200, 40), colorspace=1, color_primaries=primaries, color_trc=transfer
    )
    points = f"primaries {primaries}, transfer {transfer}, matrix 1 of H.273"
    message = rf"row 1: video \(.*\) whose colours \({points}\) are of HDR"
    for source in (path, path.read_bytes()):
        with pytest.raises(DataError, match=message):
            read_frames(source, 2, "row 1")
        with pytest.raises(DataError, match=message):
            check_video(source, "row 1")


@pytest.mark.parametrize("settings", [{"colorspace": 8}, {"colorspace": 14}, {"color_trc": 9}])
def test_colours_that_are_not_converted_are_refused(settings: dict[str, int], tmp_path: Path) -> None:
    # of YCgCo, ICtCp and logarithmic transfers OpenCV gives memory that nobody has written to, without an error
    path = write_shades(tmp_path / "a.mkv", range(0, 200, 40), **settings)
    with pytest.raises(DataError, match="are of HDR or of a wider range than sRGB"):
        read_frames(path, 2, "row 1")


def write_interlaced(path: Path, codec: str) -> Path:
    """Frames whose lines are of two moments, as of camcorders, DVDs and television."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(25), options={"flags": "+ilme+ildct"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        graph = av.filter.Graph()
        parts = [graph.add_buffer(width=64, height=48, format="yuv420p", time_base=Fraction(1, 25))]
        parts += [graph.add("setfield", "tff"), graph.add("buffersink")]
        graph.link_nodes(*parts).configure()
        for number in range(6):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 100, np.uint8), format="rgb24")
            frame = frame.reformat(format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            graph.push(frame)
            container.mux(stream.encode(graph.pull()))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(("codec", "kind"), [("mpeg2video", "mpg"), ("mpeg4", "avi")])
def test_interlaced_frames_are_refused_with_the_remedy(codec: str, kind: str, tmp_path: Path) -> None:
    path = write_interlaced(tmp_path / f"a.{kind}", codec)
    for source in (path, path.read_bytes()):
        with pytest.raises(DataError, match=r"row 1: video \(.*\) is interlaced, .* \(ffmpeg -vf bwdif\)"):
            read_frames(source, 2, "row 1")


@pytest.mark.parametrize(("primaries", "transfer"), [(1, 1), (5, 6), (6, 6), (2, 2)])
def test_colours_of_television_are_read(primaries: int, transfer: int, tmp_path: Path) -> None:
    path = write_shades(
        tmp_path / "a.mp4", range(0, 200, 40), colorspace=1, color_primaries=primaries, color_trc=transfer
    )
    assert shades(path, 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
def test_frames_of_uneven_length_are_taken_at_their_time(kind: str, tmp_path: Path) -> None:
    """Of a screen that stands still for a second, at even moments: what is seen then."""
    times = [0, 100, 200, 300, 1300, 1400, 1500, 1600]
    path = write_shades(tmp_path / f"a.{kind}", times)
    moments = np.linspace(0, 1600, 5)
    seen = [max(number for number, time in enumerate(times) if time <= moment) for moment in moments]
    assert shades(path, 5) == seen == [0, 3, 3, 3, 7]
    assert shades(path, 8)[0] == 0 and shades(path, 8)[-1] == 7


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_frames_of_animated_images_are_taken_at_their_time(kind: str, tmp_path: Path) -> None:
    """The fourth frame is shown for a second, the others for a tenth."""
    first, *others = (Image.fromarray(np.full((48, 64, 3), 10 * number, np.uint8)) for number in range(8))
    path = tmp_path / f"a.{kind}"
    durations = [100, 100, 100, 1000, 100, 100, 100, 100]
    lossless = {"lossless": True} if kind == "webp" else {}
    first.save(path, save_all=True, append_images=others, duration=durations, **lossless)
    assert shades(path, 5) == [0, 3, 3, 3, 7]
    first.save(path, save_all=True, append_images=others, duration=100, **lossless)
    assert shades(path, 8) == [*range(8)]
    assert shades(path, 4) == [0, 2, 5, 7]


def test_a_truncated_video_is_broken(tmp_path: Path) -> None:
    """Half of a download would be taken for the whole video."""
    content = write_shades(tmp_path / "a.mkv", range(0, 800, 40)).read_bytes()
    assert len(read_frames(content, 2, "row 1")) == 2
    with pytest.raises(DataError, match=r"row 1: broken video .*: only \d+ of \d+ frames can be read; it is truncated"):
        read_frames(content[: len(content) // 2], 2, "row 1")


def test_a_video_that_varies_its_rate_or_begins_late_is_whole(tmp_path: Path) -> None:
    """Matroska states no number of frames, and MP4 also that of frames that an edit list hides."""
    varying = write_shades(tmp_path / "a.mkv", [*range(0, 400, 40), 1400, 2400])
    trimmed = write_shades(tmp_path / "a.mp4", range(-400, 400, 40))
    late = write_shades(tmp_path / "late.mkv", range(1000, 1800, 40))
    for path in (varying, trimmed, late):
        head = examine_video(path, "row 1", "", 100, 10**6)
        assert head.num_frames < 0.7 * head.stated and not head.is_truncated
    assert shades(varying, 2) == [0, 11]
    assert shades(trimmed, 2) == [10, 19]


def test_a_video_whose_sound_is_longer_is_whole(tmp_path: Path) -> None:
    path = write_shades(tmp_path / "a.mkv", range(0, 400, 40))
    head = examine_video(path, "row 1", "", 100, 10**6)
    assert head.seconds == 0.4 and not head._replace(stated=100).is_truncated
    assert head._replace(stated=100, seconds=4.0).is_truncated


@pytest.mark.parametrize("opacity", [255, 254, 0])
def test_a_transparent_video_is_refused_with_the_remedy(opacity: int, tmp_path: Path) -> None:
    """OpenCV shows what lies below its transparent parts, which no player does."""
    pixels = np.full((48, 64, 4), opacity, np.uint8)
    with av.open(str(tmp_path / "a.mov"), "w") as container:
        stream = container.add_stream("qtrle", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "argb"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgba")))
        container.mux(stream.encode())
    if opacity == 255:
        check_video(tmp_path / "a.mov", "row 1")
        return
    with pytest.raises(DataError, match=r"row 1: video \(.*a.mov\) has transparent parts, .* color and overlay"):
        check_video(tmp_path / "a.mov", "row 1")


def test_frames_of_nearly_even_length_are_those_of_a_constant_rate() -> None:
    times = [0.0, 33, 67, 100, 133, 167, 200]
    assert frames_at(times, np.linspace(0, 6, 4), np.linspace(0, 200, 4)) is None
    assert frames_at([0.0] * 7, np.linspace(0, 6, 4), np.linspace(0, 0, 4)) is None


def test_frames_with_sound_are_those_of_their_moment(tmp_path: Path) -> None:
    """A video that a phone wrote at 25 frames a second, and at 5 in the dark."""
    times = [*range(0, 400, 40), *range(400, 1600, 200)]
    write_shades(tmp_path / "a.mp4", times)
    (tmp_path / "metadata.jsonl").write_text('{"image": "a.mp4", "text": "a"}\n')
    dataset = dataset_of(tmp_path, num_frames=24)
    assert isinstance(dataset, VideoSoundDataset)
    frames = dataset._read_frames(tmp_path / "a.mp4", "row 1")
    seen = [round(float(np.asarray(frame).mean()) / 10) for frame in frames]
    assert seen == [max(number for number, time in enumerate(times) if time <= 1000 * n / 24) for n in range(24)]
