"""What an episode of a dataset may contain, checked before Minari reads it.

HDF5 files can refer to other files, and declare sizes that no memory holds. Minari decodes what it
takes for JPEG with Pillow, which would also start the decoders of other formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import h5py

_JPEG = b"\xff\xd8\xff"
_LARGEST_ROW = 1 << 26
"""Bytes of one row of an array: more than any observation."""


class UnexpectedContentError(ValueError):
    """A file contains what no dataset that Minari wrote contains."""


class EpisodeChecks:
    """Checks the episodes of one HDF5 file; used as a context, which keeps the file open."""

    def __init__(self, file: Path, observation_space: Any, action_space: Any, jpeg: bool) -> None:
        self._path = file
        self._spaces = {"observations": observation_space, "actions": action_space}
        self._jpeg = jpeg
        self._file: h5py.File | None = None

    def __enter__(self) -> Self:
        """Open the file."""
        import h5py

        self._file = h5py.File(self._path, "r")
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def check(self, index: int) -> None:
        """Raise `UnexpectedContentError` for an episode that must not be read."""
        import h5py

        if self._file is None:
            raise ValueError("the file is not open")
        name = f"episode_{index}"
        if not isinstance(self._file.get(name, getlink=True), h5py.HardLink):
            raise UnexpectedContentError(f"{name} is missing, or a link")
        episode = self._file[name]
        steps = int(episode.attrs["total_steps"])
        for where, array in _arrays(episode, name):
            _check_array(where, array, steps)
        for kind, space in self._spaces.items():
            _check_space(f"{name}/{kind}", episode[kind], space, jpeg=self._jpeg)


def _arrays(group: h5py.Group, name: str) -> Iterator[tuple[str, h5py.Dataset]]:
    """Yield all arrays of a group with their names; links to elsewhere are refused."""
    import h5py

    for key in group:
        where = f"{name}/{key}"
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            raise UnexpectedContentError(f"{where} is a link")
        found = group[key]
        if isinstance(found, h5py.Group):
            yield from _arrays(found, where)
        elif isinstance(found, h5py.Dataset):
            yield where, found
        else:
            raise UnexpectedContentError(f"{where} is neither a group nor an array")


def _check_array(where: str, array: h5py.Dataset, steps: int) -> None:
    if array.external or array.is_virtual:
        raise UnexpectedContentError(f"{where} is stored in another file")
    rows = array.shape[0] if array.shape else 1
    if where.split("/")[1] == "infos":  # nothing is known of their form
        if array.nbytes > _LARGEST_ROW * (steps + 1):
            raise UnexpectedContentError(f"{where} has {array.nbytes:,} bytes")
    elif rows > steps + 1:
        raise UnexpectedContentError(f"{where} has {rows:,} rows, and the episode {steps:,} steps")
    if rows and array.nbytes // rows > _LARGEST_ROW:
        raise UnexpectedContentError(f"{where} has rows of {array.nbytes // rows:,} bytes")


def _check_space(where: str, stored: Any, space: Any, *, jpeg: bool) -> None:
    """Refuse arrays that do not have the shape of their space, and images that are not JPEG."""
    from minari.dataset.minari_storage import is_image_space

    entries = getattr(space, "spaces", None)
    if entries is not None:
        named = entries.items() if hasattr(entries, "items") else enumerate(entries)
        for key, entry in named:
            inner = key if isinstance(key, str) else f"_index_{key}"
            _check_space(f"{where}/{inner}", stored[inner], entry, jpeg=jpeg)
    elif jpeg and is_image_space(space):
        first = stored[:, :3] if stored.ndim == 2 else stored[:]
        for number, image in enumerate(first):
            if bytes(image[:3]) != _JPEG:
                raise UnexpectedContentError(f"image {number} is not JPEG")
    elif space.shape is not None and stored.shape[1:] != space.shape:
        raise UnexpectedContentError(
            f"{where} has the shape {stored.shape[1:]}, and its space {space.shape}"
        )
