"""Checkpoints: what goes in comes out, what cannot is refused, and damage is never silent."""

from __future__ import annotations

import collections
import enum
import errno
import os
import pickle
import struct
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_training.checkpointing import (
    FORMAT,
    find_checkpoint,
    link_checkpoint,
    load_checkpoint,
    prune,
    save_checkpoint,
    state_digest,
    to_storable,
)
from rl_training.errors import CheckpointError, StorageError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def identical(a: Any, b: Any) -> bool:
    """Same types, same structure in the same order, same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        same = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        return same and _bits(a) == _bits(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(
            type(x) is type(y) and identical(a[x], b[y]) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, list):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)


def _bits(tensor: Tensor) -> bytes:
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    return bytes(whole.reshape(-1).view(torch.uint8).tolist()) if whole.numel() else b""


def round_trip(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    save_checkpoint(folder / "a.pt", state)
    return load_checkpoint(folder / "a.pt")


def small_state() -> dict[str, Any]:
    """Everything a checkpoint holds, in few bytes."""
    return {
        "weights": torch.tensor([[1.5, -2.0], [0.0, 3.25]]),
        "steps": torch.tensor([1, 2, 3]),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "plain": [1, 2.5, None, True, "name", {"deep": -1, 7: [2**127 + 1]}],
    }


# What goes in comes out.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (0,), (2, 0)], ids=str)
def test_tensors_of_every_dtype_come_back(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    assert identical(round_trip(tmp_path, {"x": tensor}), {"x": tensor})


@pytest.mark.parametrize("name", ["bool", "uint8", "int32", "int64", "float16", "float64"])
@pytest.mark.parametrize("shape", [(), (2, 3), (0, 4)], ids=str)
def test_arrays_come_back_as_tensors(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(name)
    back = round_trip(tmp_path, {"x": array})["x"]
    assert identical(back, torch.tensor(array.tolist(), dtype=getattr(torch, name)).reshape(shape))


def test_nested_plain_values_come_back_in_order(tmp_path: Path) -> None:
    state = {
        "z": [1, [2, {"x": None, "a": [True, False]}], ""],
        "a": {"float": 0.1, "infinite": -float("inf"), "zero": -0.0, "text": "ä\n\ud800", 3: "int"},
        "empty": {"dict": {}, "list": []},
        "nan": float("nan"),
    }
    assert identical(round_trip(tmp_path, state), state)


def test_tuples_numpy_scalars_and_mappings_come_back_as_plain_ones(tmp_path: Path) -> None:
    state = {
        "tuple": (1, (2, 3)),
        "scalars": [np.float32(0.5), np.int64(7), np.bool_(True), np.str_("x")],
        "ordered": collections.OrderedDict(b=1, a=2),
    }
    expected = {
        "tuple": [1, [2, 3]],
        "scalars": [0.5, 7, True, "x"],
        "ordered": {"b": 1, "a": 2},
    }
    assert identical(round_trip(tmp_path, state), expected)


def test_random_states_of_128_bits_come_back_and_go_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(123)
    rng.random(5)
    state = dict(rng.bit_generator.state)
    assert state["state"]["state"].bit_length() > 100
    back = round_trip(tmp_path, {"numpy": state, "huge": -(10**300)})
    assert back == {"numpy": state, "huge": -(10**300)}
    other = np.random.default_rng(0)
    other.bit_generator.state = back["numpy"]
    assert other.random(10).tolist() == rng.random(10).tolist()


def test_a_torch_generator_and_an_optimizer_come_back_and_go_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 2) for _ in range(2)]
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.1) for layer in layers]
    generator, other = torch.Generator().manual_seed(4), torch.Generator()

    def step(i: int) -> None:
        layers[i].zero_grad()
        layers[i](torch.ones(1, 3)).sum().backward()
        optimizers[i].step()

    step(0)
    saved = {
        "layer": layers[0].state_dict(),
        "optimizer": optimizers[0].state_dict(),
        "rng": generator.get_state(),
    }
    back = round_trip(tmp_path, saved)
    layers[1].load_state_dict(back["layer"])
    optimizers[1].load_state_dict(back["optimizer"])
    other.set_state(back["rng"])
    step(0)
    step(1)
    assert torch.equal(layers[0].weight, layers[1].weight)
    assert torch.equal(torch.rand(5, generator=generator), torch.rand(5, generator=other))


def test_a_parameter_comes_back_as_a_tensor_without_its_graph(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    back = round_trip(tmp_path, {"x": parameter, "y": parameter * 2})
    assert identical(back, {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([2.0, 4.0])})


def test_a_view_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    big = torch.arange(1_000_000.0)
    back = round_trip(tmp_path, {"x": big[10:13], "t": big[:6].view(2, 3).T})
    assert identical(back["x"], torch.tensor([10.0, 11.0, 12.0]))
    assert identical(back["t"], torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    assert (tmp_path / "a.pt").stat().st_size < 10_000


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(8.0).view(4, 2)[:1, 1],
        torch.arange(8.0).view(4, 2)[:, :1],
        torch.arange(8.0).view(4, 2)[1:2, 1:],
        torch.arange(8.0, dtype=torch.float64)[::3],
        torch.ones(1).expand(4),
        torch.empty_strided((1,), (2,)).fill_(3.0),
        torch.arange(4.0).view(1, 4).T,
    ],
    ids=["cell", "column", "corner", "stepped", "expanded", "strided", "turned"],
)
def test_views_with_odd_strides_come_back(tmp_path: Path, tensor: Tensor) -> None:
    back = round_trip(tmp_path, {"x": tensor})["x"]
    assert back.dtype == tensor.dtype
    assert back.tolist() == tensor.tolist()


def test_arrays_with_odd_strides_come_back(tmp_path: Path) -> None:
    array = np.arange(6.0).reshape(2, 3)
    back = round_trip(tmp_path, {"backwards": array[::-1, ::-2], "turned": array.T})
    assert back["backwards"].tolist() == [[5.0, 3.0], [2.0, 0.0]]
    assert back["turned"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


# What cannot be held is refused when it is saved.


class Colour(enum.IntEnum):
    RED = 1


class Word(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        (Path("x"), "Path"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (range(3), "range"),
        (1j, "complex"),
        (len, "builtin_function_or_method"),
        (np.array([object()]), "array of object"),
        (np.array(["text"]), "array of <U4"),
        (np.zeros(2, [("field", "f4")]), "array of"),
        (Colour.RED, "Colour"),
        (Word("x"), "Word"),
        (np.datetime64("2020-01-01"), "date"),
        (np.longdouble(1.5), "longdouble"),
        (torch.eye(2).to_sparse(), "parse"),
        (torch.ones(2, device="meta"), "meta"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_name(
    tmp_path: Path, value: Any, kind: str
) -> None:
    state = {"agent": {"parts": [0, value]}}
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "a.pt", state)
    assert "state.agent.parts[1]" in str(caught.value)
    assert kind in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", [1.5, None, (1, 2), np.str_("text")], ids=repr)
def test_keys_other_than_text_and_integers_are_refused(tmp_path: Path, key: Any) -> None:
    with pytest.raises(CheckpointError, match=f"state.agent.*{type(key).__name__}"):
        save_checkpoint(tmp_path / "a.pt", {"agent": {key: 1}})
    assert not list(tmp_path.iterdir())


def test_an_array_of_foreign_byte_order_is_refused_or_right(tmp_path: Path) -> None:
    array = np.arange(3, dtype=np.float32).astype(np.dtype(np.float32).newbyteorder())
    try:
        save_checkpoint(tmp_path / "a.pt", {"x": array})
    except CheckpointError as error:
        assert "state.x" in str(error)  # noqa: PT017 - either outcome will do
    else:
        assert load_checkpoint(tmp_path / "a.pt")["x"].tolist() == [0.0, 1.0, 2.0]


# Damage.


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 9))
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), tensors()
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=6,
)
states = st.dictionaries(st.text(max_size=6), trees, max_size=4)


@settings(max_examples=80, deadline=None)
@given(states)
def test_every_storable_state_comes_back_bit_for_bit(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert identical(round_trip(Path(folder), state), state)


def assert_refused_or_same(path: Path, damaged: bytes, state: Any, what: object) -> bool:
    """Load a damaged file; True where it was refused."""
    path.write_bytes(damaged)
    try:
        loaded = load_checkpoint(path)
    except CheckpointError:
        return True
    assert identical(loaded, state), what
    return False


@settings(max_examples=150, deadline=None)
@given(states, st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_harmless(
    state: dict[str, Any], where: float, change: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        save_checkpoint(path, state)
        content = bytearray(path.read_bytes())
        content[int(where * len(content))] ^= change
        assert_refused_or_same(path, bytes(content), state, (where, change))


@settings(max_examples=60, deadline=None)
@given(states, st.floats(0, 1, exclude_max=True))
def test_a_torn_file_is_refused(state: dict[str, Any], where: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        save_checkpoint(path, state)
        content = path.read_bytes()
        path.write_bytes(content[: int(where * len(content))])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save_checkpoint(path, small_state())
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_every_flipped_bit_of_the_structure_is_refused_or_harmless(tmp_path: Path) -> None:
    """Structure and plain values: all bits of the pickle stream, whose checksum torch ignores."""
    path = tmp_path / "a.pt"
    state = small_state()
    save_checkpoint(path, state)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        record = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
        stream = archive.read(record)
    start = content.index(stream)
    refused = 0
    for i in range(start, start + len(stream)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[i] ^= 1 << bit
            refused += assert_refused_or_same(path, bytes(damaged), state, (i - start, bit))
    assert refused > 4 * len(stream)


def test_every_flipped_bit_of_tensor_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    marker = torch.tensor([1.5, -2.25, 1e9, 7.0], dtype=torch.float64)
    save_checkpoint(path, {"x": marker})
    content = path.read_bytes()
    start = content.index(struct.pack("4d", *marker.tolist()))
    for i in range(start, start + 32):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[i] ^= 1 << bit
            path.write_bytes(bytes(damaged))
            with pytest.raises(CheckpointError, match="does not match"):
                load_checkpoint(path)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": 1}, {"x": True}),
        ({"x": 1}, {"x": 1.0}),
        ({"x": 1}, {"x": "1"}),
        ({"x": 0.0}, {"x": -0.0}),
        ({"x": None}, {"x": "None"}),
        ({"x": []}, {"x": {}}),
        ({1: 0}, {"1": 0}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"x": [[1], 2]}, {"x": [[1, 2]]}),
        ({"x": ["a", "b"]}, {"x": ["a:b"]}),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(2, 1)}),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(2, dtype=torch.int32)}),
        ({"x": torch.zeros(0, 3)}, {"x": torch.zeros(3, 0)}),
        ({"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])}),
        ({"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([2.0, 1.0])}),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(2, requires_grad=True)}),
    ],
)
def test_the_digest_tells_apart_what_differs(a: dict[Any, Any], b: dict[Any, Any]) -> None:
    assert state_digest(a) != state_digest(b)
    assert state_digest(a) == state_digest(dict(a))


def write(path: Path, state: Any, digest: Any = None, version: Any = FORMAT) -> None:
    """A file of the right shape, by hand."""
    digest = state_digest(state) if digest is None else digest
    torch.save({"format": version, "digest": digest, "state": state}, path)


def test_a_file_by_hand_loads_so_that_the_next_refusals_mean_something(tmp_path: Path) -> None:
    write(tmp_path / "a.pt", {"x": 1})
    assert load_checkpoint(tmp_path / "a.pt") == {"x": 1}


def holds_itself() -> dict[str, Any]:
    state: dict[str, Any] = {"x": 1}
    state["self"] = state
    return state


@pytest.mark.parametrize(
    ("state", "digest"),
    [
        ({"x": 1}, "0" * 64),
        ({"x": 1}, 7),
        ({"x": 1}, torch.zeros(2)),
        ([1, 2], None),
        (holds_itself(), "0" * 64),
        ({"x": torch.eye(2).to_sparse()}, "0" * 64),
        ({"x": torch.zeros(2, requires_grad=True)}, state_digest({"x": torch.zeros(2)})),
    ],
    ids=["digest", "number", "tensor", "list", "itself", "sparse", "graph"],
)
def test_an_altered_file_is_refused(tmp_path: Path, state: Any, digest: Any) -> None:
    path = tmp_path / "a.pt"
    write(path, state, digest)
    with pytest.raises(CheckpointError, match=r"a\.pt (was altered|is damaged|contains code)"):
        load_checkpoint(path)


@pytest.mark.parametrize("version", [FORMAT + 1, 99, 0, -1, True, "2", None, 1.5])
def test_another_format_is_refused_with_its_version(tmp_path: Path, version: Any) -> None:
    path = tmp_path / "a.pt"
    write(path, {"x": 1}, version=version)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert f"format {version!r}" in str(caught.value)
    assert f"reads up to {FORMAT}" in str(caught.value)


@pytest.mark.parametrize(
    "content", [{"weight": torch.zeros(2)}, [1, 2], torch.zeros(2), 5], ids=repr
)
def test_another_programs_file_is_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "a.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of rl_training"):
        load_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04", b"\x80\x02.", b"\x00" * 5000])
def test_any_other_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"is damaged|is empty|is not a checkpoint|contains code"
    ):
        load_checkpoint(path)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("how", ["pickle", "torch", "old_torch", "inside"])
def test_a_pickle_bomb_is_refused_and_nothing_is_executed(tmp_path: Path, how: str) -> None:
    marker, path = tmp_path / "marker", tmp_path / "a.pt"
    bomb = Bomb(marker)
    if how == "pickle":
        path.write_bytes(pickle.dumps(bomb))
    elif how == "torch":
        torch.save(bomb, path)
    elif how == "old_torch":
        torch.save({"format": FORMAT, "state": bomb}, path, _use_new_zipfile_serialization=False)
    else:
        write(path, {"x": torch.zeros(2), "bomb": bomb}, digest="0" * 64)
    with pytest.raises(CheckpointError, match=r"contains code.*not opened$") as caught:
        load_checkpoint(path)
    assert "weights_only" not in str(caught.value), "no advice on how to open it anyway"
    assert not marker.exists()

    if how == "pickle":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert marker.exists(), "the bomb was no bomb"


def test_a_bomb_in_the_state_is_refused_when_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.x is a Bomb"):
        save_checkpoint(tmp_path / "a.pt", {"x": Bomb(tmp_path / "marker")})


# Files.


def test_a_missing_file_and_a_folder_are_no_checkpoints(tmp_path: Path) -> None:
    for path in (tmp_path / "a.pt", tmp_path):
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path)
        assert f"no checkpoint at {path}" in str(caught.value)


@pytest.mark.parametrize("damage", ["torn", "altered"])
def test_the_checkpoint_before_a_damaged_one_is_offered(tmp_path: Path, damage: str) -> None:
    now = time.time()
    for age, name in enumerate(("step_30", "step_20", "step_9", "mine")):
        save_checkpoint(tmp_path / f"{name}.pt", {"x": torch.full((8,), 1.5)})
        os.utime(tmp_path / f"{name}.pt", (now - 60 * age, now - 60 * age))
    link_checkpoint(tmp_path / "step_30.pt", tmp_path / "last.pt")
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    path = tmp_path / "step_30.pt"
    content = path.read_bytes()
    if damage == "torn":
        content = content[:-40]
    else:
        content = content.replace(struct.pack("f", 1.5), struct.pack("f", 2.5))
    with path.open("r+b") as file:  # in place: the second name shares the damage
        file.write(content)
        file.truncate()
    for name in ("step_30.pt", "last.pt"):
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(tmp_path / name)
        assert str(caught.value).endswith(f"the one before it: {tmp_path / 'step_20.pt'}")


def test_nothing_is_offered_where_there_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_bytes(b"torn")
    save_checkpoint(tmp_path / "mine.pt", {"x": 1})
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "last.pt")
    assert "before it" not in str(caught.value)


def test_nothing_is_offered_for_a_file_that_no_run_wrote(tmp_path: Path) -> None:
    (tmp_path / "garbage.pt").write_bytes(b"torn")
    save_checkpoint(tmp_path / "step_1.pt", {"x": 1})
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "garbage.pt")
    assert "before it" not in str(caught.value)


@pytest.mark.parametrize("failing", ["fsync", "write", "replace"])
@pytest.mark.parametrize("earlier", [True, False], ids=["over", "anew"])
def test_a_failed_write_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, earlier: bool
) -> None:
    path = tmp_path / "last.pt"
    if earlier:
        save_checkpoint(path, small_state())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    elif failing == "replace":
        monkeypatch.setattr(Path, "replace", fail)
        monkeypatch.setattr(os, "replace", fail)
    else:
        real_open = Path.open

        def half_open(self: Path, *args: Any, **kwargs: Any) -> Any:
            file: Any = real_open(self, *args, **kwargs)
            file.write(b"half a checkpoint")
            file.flush()
            file.close()
            return real_open(Path("/dev/full"), "wb", buffering=0)

        if not Path("/dev/full").exists():
            pytest.skip("needs a device that is always full")
        monkeypatch.setattr(Path, "open", half_open)
    with pytest.raises(StorageError, match=r"cannot write .*last\.pt: No space left on device"):
        save_checkpoint(path, {"x": 2})
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    if earlier:
        assert identical(load_checkpoint(path), small_state())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write"):
        save_checkpoint(tmp_path / "file" / "a.pt", {"x": 1})


def test_the_file_is_on_disk_before_it_takes_its_name_and_nothing_else_ends_in_pt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "folder" / "last.pt"
    save_checkpoint(path, {"x": 1})
    seen: list[tuple[bool, list[str], int]] = []
    real = os.fsync

    def watch(descriptor: int) -> None:
        state = load_checkpoint(path)
        names = sorted(p.name for p in path.parent.iterdir())
        is_folder = os.path.samestat(os.fstat(descriptor), path.parent.stat())
        seen.append((is_folder, names, state["x"]))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    save_checkpoint(path, {"x": 2})
    assert [is_folder for is_folder, _, _ in seen][:2] == [False, True]
    _, names, old = seen[0]
    assert old == 1, "the new content took the name before it was on disk"
    assert [name for name in names if name.endswith(".pt")] == ["last.pt"]
    assert len(names) == 2
    assert [p.name for p in path.parent.iterdir()] == ["last.pt"]
    assert load_checkpoint(path) == {"x": 2}


def test_saving_does_not_change_or_alias_the_state(tmp_path: Path) -> None:
    state = small_state()
    save_checkpoint(tmp_path / "a.pt", state)
    assert identical(state, small_state())
    array = np.zeros(3)
    stored = to_storable({"x": array})
    array[:] = 1.0
    assert stored["x"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_link_is_a_second_name_that_outlives_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard_links: bool
) -> None:
    if not hard_links:

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    step, last = tmp_path / "step.pt", tmp_path / "last.pt"
    save_checkpoint(last, {"x": 0})
    save_checkpoint(step, {"x": 1})
    link_checkpoint(step, last)
    assert load_checkpoint(last) == {"x": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.pt", "step.pt"]
    prune([step, tmp_path / "gone.pt"])
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]
    assert load_checkpoint(last) == {"x": 1}


def test_a_checkpoint_is_found_by_its_path_or_its_run(tmp_path: Path) -> None:
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    save_checkpoint(last, {"x": 1})
    for path in (last, last.parent, last.parent.parent):
        assert find_checkpoint(path) == last
    with pytest.raises(CheckpointError, match=r"contains no checkpoint.*one run folder: .*run$"):
        find_checkpoint(tmp_path)
    newer = tmp_path / "another" / "checkpoints" / "last.pt"
    save_checkpoint(newer, {"x": 1})
    os.utime(last, (time.time() - 60,) * 2)
    with pytest.raises(CheckpointError, match=r"contains 2 run folders: .* newest is .*another$"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint or run folder"):
        find_checkpoint(tmp_path / "absent")


def test_loading_never_unpickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "a.pt", {"x": torch.ones(2)})

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing unpickles a checkpoint")

    for owner, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(owner, name, refuse)
    assert load_checkpoint(tmp_path / "a.pt")["x"].tolist() == [1.0, 1.0]
