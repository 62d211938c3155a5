"""Write videos and GIFs frame by frame, with a caption above each; no partial file remains."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_training._internal.lazy import resolve
from rl_training.errors import UserError
from rl_training.types import Array

_NEEDED = ("imageio_ffmpeg", "PIL")
_MIN_WIDTH = 320
_FASTEST_GIF = 50
"""Highest frame rate of a GIF: browsers slow down delays below 0.02 s."""
_GIF_PALETTES = "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1"
"""One palette per frame, so that frames can be written before the last one is known."""


def require_video_extra(what: str) -> None:
    """Raise UserError naming the extra if a package for videos is missing; ``what`` needs it."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        raise UserError(f"{what} needs the extra 'video'; in the clone: pip install '.[video]'")


def captioned(picture: Array, text: str) -> Array:
    """Return the picture with a caption strip above it.

    Small pictures are enlarged, and odd sizes padded to even ones, which H.264 requires.
    """
    from PIL import Image, ImageDraw, ImageFont

    zoom = -(-_MIN_WIDTH // picture.shape[1])
    large = picture.repeat(zoom, axis=0).repeat(zoom, axis=1)
    height, width = large.shape[0], large.shape[1]
    font_size = max(14, width // 30)
    strip = font_size * 2
    canvas = Image.new("RGB", (width + width % 2, strip + height + (strip + height) % 2))
    canvas.paste(Image.fromarray(large), (0, strip))
    font: Any = ImageFont.load_default(font_size)
    ImageDraw.Draw(canvas).text((font_size // 2, font_size // 3), text, "white", font)
    return np.asarray(canvas)


@contextlib.contextmanager
def open_video(path: Path, fps: float) -> Iterator[Callable[[Array], None]]:
    """Yield a function that adds a frame; the file appears when the context ends without error."""
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(8)}.tmp{path.suffix}")
    encoder = _Encoder(temporary, fps)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()  # ffmpeg would explain in many lines why it cannot
        yield encoder.add
        encoder.finish()
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]  # of many about ffmpeg
        raise UserError(f"cannot write {path}: {reason}") from error
    finally:
        encoder.finish()
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


class _Encoder:
    """ffmpeg, started at the first frame; all frames must have its size."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path = path
        self._fps = fps
        self._shape: tuple[int, ...] = ()
        self._frames: Any = None

    def add(self, frame: Array) -> None:
        if self._frames is None:
            self._shape = frame.shape
            self._frames = self._begin()
            self._frames.send(None)
        if frame.shape != self._shape:
            raise UserError(
                f"the environment's pictures changed size from {self._shape[1::-1]}"
                f" to {frame.shape[1::-1]}: all frames of a video must have the same size"
            )
        self._frames.send(np.ascontiguousarray(frame))

    def _begin(self) -> Any:
        write_frames = resolve("imageio_ffmpeg:write_frames")
        size = (self._shape[1], self._shape[0])
        common: dict[str, Any] = {"ffmpeg_log_level": "error"}
        if self._path.suffix.lower() == ".gif":
            return write_frames(
                str(self._path),
                size,
                fps=min(self._fps, _FASTEST_GIF),
                codec="gif",
                pix_fmt_out="pal8",
                quality=None,
                macro_block_size=1,
                output_params=["-filter_complex", _GIF_PALETTES],
                **common,
            )
        return write_frames(
            str(self._path), size, fps=self._fps, quality=7, macro_block_size=2, **common
        )

    def finish(self) -> None:
        frames, self._frames = self._frames, None
        if frames is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                frames.close()
