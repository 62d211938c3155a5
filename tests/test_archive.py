"""The strict reader of checkpoint files: ours as torch reads them, an error for all others."""

from __future__ import annotations

import base64
import io
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import MakeConfig
from rl_training import archive, plain_pickle, stored_zip
from rl_training.archive import ArchiveError, check_storable, read_archive
from rl_training.checkpointing import to_storable
from rl_training.experiment.manager import ExperimentManager
from state_compare import differences

# What `torch.save` of torch 2.6.0 wrote for the tree in `test_reads_a_file_of_an_older_torch`.
TORCH_2_6 = (
    "c-p0vO;6N77{{mkZc$(XVetj=m7=h0x9l!!5J+R{p+<2H$;QNN%5K?htXrP$ECv%2E)emec=BXCs$auT;LVd458k|(7%"
    "m29+NHJyL}aql*=gthJinRwPdh6ILkPuUXjkb(T}Uy@HEl^9t0-7WE<VyFu^m0|l-0lrAg&l8f(65TtYBbd#_CqIs@lL"
    "1C<aI;wE)3lnEYvA1*;HRfiPEONdE~$%Ge-jlBFir^afip)%m8TS4vo|Hw?41lx88yamA=5HcX|eLd=%1l5QyYzI~I0V"
    "^+Wvu*D#0%Zp8DlOq_8-;<FXkb~=RLJrEzI<#+;%Z9G2Wvm(X27A}6sHR%Esg*Gc9m56a#1Jn)mldrE-3Q<aEc9?(t%a"
    "0qA+mFIyu7GZ9JrHKI39XyZE^@hp9QrB37J`g{*4;Vd#W|7rdG#%mW9(8&J^IRC9K0hE&3-7d)ug2o!IBBA!!&Su^9~K"
    "N$lZaJLUxp7YlI78lb{uPYls8bSK6YYlr|tBnHC3Q9eSr4#Q;a$f8}f<6XlrQh-rwh0S^ulF#Fe*EXxDNDPH^jqLr{Lr"
    "8IVp52<>vY%O2`1l@pRgSJey4g(5%F)=DAECrFc|z;#zIKcw(Xr$FGFA<`ZIU?U^W$NQu3@aJ6l3ki*M90-TKC6jM^m0"
    "tF_x0V>qlT{E!s4>%#a_ctE9f2p+tQzzilSSgTw(uBVHn261jgSV$k+B&9(mF%MjhS&;hw-yt&enIC-QU__b{p%AkB!$"
    "~0-rVL*E_OnMmvNu2m^hW+Q-fx4YMORCu*FAGWR@Fx;jO8)6hb&h&F@YmHFKxrpp(n4>jrl#oHQ-!{YN?Jt{lZTv1DwE"
    "9$89tv$jgRvae14qI=Td@@&8PWXj!$KT^mrzh%L<fo^VOiv5f09xWGJk|={|&=yU6|D0l(UPcH$o8ivZevZ2fY#(c3-p"
    "-XQWFH^0_xT(9<>U(5ToZo_%CJt3bqy`$aRlJ4@_uNC}x-FE5lh6*FU>HK2%E)ICK1($elf6dB~$jFWxgQJcz=4*epUg"
    "}$6yCpjM{YBrScAv5Cg(J2mW{tPU{stTL*Dw"
)

# --- Files as the writer makes them, and by hand ---


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read(folder: Path, content: bytes) -> Any:
    path = folder / "file.pt"
    path.write_bytes(content)
    return read_archive(path)


class Entry(NamedTuple):
    """An entry of a zip file made by hand, and what its headers declare instead of the truth."""

    name: str
    content: bytes
    size: int | None = None
    stored: int | None = None
    crc: int | None = None
    flags: int = 0x808
    method: int = 0
    offset: int | None = None
    local_name: str | None = None
    local_size: int = 0  # in the descriptor
    extra: bytes = b""
    wide: bool = False  # sizes and offset in 64 bits


def zipped(
    *entries: Entry,
    before: int = 0,
    between: bytes = b"",
    directory_end: bytes = b"",
    after_directory: bytes = b"",
    count: int | None = None,
    comment: bytes = b"",
) -> bytes:
    """A zip file in the layout of the writer."""
    body, directory = bytearray(), bytearray()
    for e in entries:
        offset = before + len(body) if e.offset is None else e.offset
        size = len(e.content) if e.size is None else e.size
        stored = size if e.stored is None else e.stored
        crc = zlib.crc32(e.content) if e.crc is None else e.crc
        name, local_name = e.name.encode(), (e.local_name or e.name).encode()
        header = (b"PK\3\4", 0, e.flags, e.method, 0, 0, 0, 0, e.local_size, len(local_name), 0)
        body += struct.pack("<4s5H3I2H", *header) + local_name + e.content
        body += struct.pack("<4s3I", b"PK\7\x08", crc, 0, 0)
        extra = e.extra
        if e.wide:
            extra = struct.pack("<2H3Q", 1, 24, size, stored, offset)
            size = stored = offset = 0xFFFFFFFF
        rest = (crc, stored, size, len(name), len(extra), 0, 0, 0, 0, offset)
        record = (b"PK\1\2", 0, 0, e.flags, e.method, 0, 0, *rest)
        directory += struct.pack("<4s6H3I5H2I", *record) + name + extra
    body += between
    directory += directory_end
    start, size = before + len(body), len(directory)
    count = len(entries) if count is None else count
    directory += after_directory
    ends = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0, 0, 0, 0, count, count, size, start)
    ends += struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1)
    ends += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, start, len(comment))
    return bytes(body + directory) + ends + comment


ORDER = Entry("archive/byteorder", b"little")
VERSION = Entry("archive/version", b"3\n")


def around(code: bytes, *storages: bytes) -> bytes:
    """A file with a pickle made by hand."""
    data = [Entry(f"archive/data/{i}", content) for i, content in enumerate(storages)]
    return zipped(Entry("archive/data.pkl", code), ORDER, *data, VERSION)


def integer(value: int) -> bytes:
    return b"\x8a\x0a" + value.to_bytes(10, "little", signed=True)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


class Described(NamedTuple):
    """The pickle of a float tensor in ``data/0``; each field can be made wrong."""

    shape: bytes = numbers(2)
    strides: bytes = numbers(1)
    numel: bytes = integer(2)
    offset: bytes = integer(0)
    grad: bytes = b"\x89"
    hooks: bytes = b"ccollections\nOrderedDict\n)R"
    kind: bytes = b"ctorch\nFloatStorage\n"
    tag: bytes = text("storage")
    key: bytes = text("0")
    device: bytes = text("cpu")
    rebuild: bytes = b"ctorch._utils\n_rebuild_tensor_v2\n"
    dtype: bytes = b""
    after: bytes = b""

    def code(self) -> bytes:
        storage = b"(" + self.tag + self.kind + self.key + self.device + self.numel + b"tQ"
        rest = self.offset + self.shape + self.strides + self.grad + self.hooks + self.dtype
        return self.rebuild + b"(" + storage + rest + b"tR" + self.after

    def file(self, content: bytes = bytes(8)) -> bytes:
        return around(b"\x80\2" + self.code() + b".", content)


# --- Equality with torch ---

DTYPES = sorted(plain_pickle.DTYPES, key=str)
SHAPES: list[tuple[int, ...]] = [(), (0,), (0, 3), (1,), (1, 3, 1), (2, 3), (3, 1, 2), (300_001,)]


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's storage, which not every data type can be compared without."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert (a.device, a.requires_grad) == (b.device, b.requires_grad)
        assert torch.equal(raw(a), raw(b))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert repr(a) == repr(b)


def assert_as_torch_reads(folder: Path, content: bytes) -> Any:
    result = read(folder, content)
    assert_same(result, torch.load(io.BytesIO(content), weights_only=True))
    return result


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_torch_for_every_dtype_and_shape(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        numel = int(np.prod(shape))
        high = 2 if dtype is torch.bool else 256
        size = (numel * dtype.itemsize,)
        data = torch.randint(high, size, dtype=torch.uint8, generator=generator)
        return data.view(dtype).reshape(shape)

    tree = {str(shape): tensor(shape) for shape in SHAPES}
    result = assert_as_torch_reads(tmp_path, saved(tree))
    (tmp_path / "file.pt").unlink()
    for item in result.values():
        raw(item).zero_()  # writable, and still there without the file
        assert raw(item).count_nonzero() == 0


BITS = (0, 1, 7, 8, 15, 16, 31, 32, 63, 64, 127, 2038)
LONG = {i: str(i) for i in range(2000)}
TREES: dict[str, Any] = {
    "integers": [s * 2**b - d for b in BITS for s in (-1, 1) for d in (0, 1)],
    "constants": [None, True, False, 0.0, -0.0, float("nan"), float("inf"), 5e-324],
    "strings": ["", "é", "\ud800", "\U0001f600", "a" * 300, "same", "same", "\x00\n"],
    "keys": {"1": 1, 1: "1", -1: None, 2**63 - 1: 0, -(2**63): 0, "": []},
    "nested": {"a": [[], {}, [[[]]], {"b": {}}], "c": [{"d": [1]}, {"d": [1]}]},
    **{f"dict of {n}": dict(list(LONG.items())[:n]) for n in (1, 999, 1000, 1001, 2000)},
    **{f"list of {n}": list(range(n)) for n in (1, 999, 1000, 1001, 2000)},
    "many names": {f"key {i}": f"value {i}" for i in range(300)} | {"again": "value 299"},
    "plain value": 7,
    "tensor": torch.ones(3),
}


@pytest.mark.parametrize("name", TREES)
def test_equals_torch_for_plain_trees(tmp_path: Path, name: str) -> None:
    check_storable(TREES[name])
    assert_as_torch_reads(tmp_path, saved(TREES[name]))


def test_equals_torch_for_what_the_writer_makes_of_arrays_and_views(tmp_path: Path) -> None:
    weight = torch.randn(4, 6)
    fortran = np.asfortranarray(np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2))
    parameter = torch.nn.Parameter(torch.randn(3))
    tree = to_storable(
        {
            "weight": weight,
            "the same": weight,
            "reshaped": weight.view(2, 12),
            "row": weight[1],
            "transposed": weight.T,
            "expanded": torch.ones(1).expand(5),
            "one, any stride": weight[:1, :1],
            "fortran": fortran,
            "parameter": parameter,
            "scalar": np.float32(2.5),
        }
    )
    check_storable(tree)
    result = assert_as_torch_reads(tmp_path, saved(tree))
    assert not result["fortran"].is_contiguous()
    result["weight"].zero_()  # shared in the file, shared when read: as torch does
    assert result["reshaped"].count_nonzero() == 0


def test_reads_a_file_of_an_older_torch(tmp_path: Path) -> None:
    content = zlib.decompress(base64.b85decode(TORCH_2_6))
    state = {
        "w": torch.arange(6.0).reshape(2, 3),
        "u": torch.tensor([1, 65535], dtype=torch.uint16),
        "n": torch.tensor(-3),
        "e": torch.zeros(0, 2, dtype=torch.bool),
        "rng": 2**127 + 1,
        "list": [None, True, 1.5, "é"],
        7: {},
    }
    expected = {"format": 1, "digest": "0f", "state": state}
    assert_same(read(tmp_path, content), expected)


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_equals_torch_on_the_files_of_a_run(algo: str, make_config: MakeConfig) -> None:
    trainer = ExperimentManager.setup(make_config(algo=algo, total_timesteps=200, eval_episodes=0))
    run_dir = Path(trainer.train().run_dir)
    files = [*run_dir.rglob("*.pt"), *run_dir.rglob("*.replay")]
    assert (run_dir / "checkpoints" / "last.pt") in files
    assert algo == "ppo" or any(path.suffix == ".replay" for path in files)
    for path in files:
        content = torch.load(path, weights_only=True)
        check_storable(content)
        assert_same(read_archive(path), content)


def test_hand_made_files_are_read(tmp_path: Path) -> None:
    """What the hostile files below are made of is accepted when nothing is wrong."""
    content = np.array([1.5, 2.5], np.float32).tobytes()
    assert read(tmp_path, Described().file(content)).tolist() == [1.5, 2.5]
    entry = Entry("archive/data/0", content, wide=True)
    code = Entry("archive/data.pkl", b"\x80\2" + Described().code() + b".", wide=True)
    assert read(tmp_path, zipped(code, ORDER, entry)).tolist() == [1.5, 2.5]


# --- Hostile and damaged files ---


class Evil:
    """Creates a file when unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.system, ("touch executed",)


def legacy() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


HOLDS_CODE: dict[str, Callable[[], bytes]] = {
    "os.system": lambda: saved({"a": Evil()}),
    "os.system among tensors": lambda: saved({"w": torch.ones(2), "a": [Evil()]}),
    "a module": lambda: saved(torch.nn.Linear(1, 1)),
    "eval": lambda: around(b"\x80\2c__builtin__\neval\n" + text("1") + b"\x85R."),
    "a tensor's subclass": lambda: around(b"\x80\2ctorch._tensor\n_rebuild_from_type_v2\n"),
    "a quantized storage": lambda: around(b"\x80\2ctorch\nQInt32Storage\n"),
    "a name without end": lambda: around(b"\x80\2c" + b"a" * 1000),
    "a bare call": lambda: pickle.dumps(Evil(), protocol=0),
    "bare protocol 0": lambda: pickle.dumps({"a": Evil()}, protocol=0),
    "bare protocol 1": lambda: pickle.dumps({"a": Evil()}, protocol=1),
    "bare protocol 2": lambda: pickle.dumps({"a": Evil()}, protocol=2),
    "bare protocol 5": lambda: pickle.dumps({"a": Evil()}, protocol=5),
    "legacy torch": legacy,
}


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


# Lists that hold the list before them twice: 2**60 values in a kilobyte.
DOUBLING = b"]" + put(0) + b"".join(b"](" + get(i) * 2 + b"e" + put(i + 1) for i in range(60))
# Keys that all have one hash, with which a dict takes quadratic time.
SAME_HASH = b"}(" + b"".join(integer(i * (2**61 - 1)) + b"N" for i in range(1, 20_000)) + b"u"
STORAGE = b"ctorch\nFloatStorage\n"

# A word of the message, and the instructions between the first (the protocol) and the last.
PICKLES: dict[str, tuple[str, bytes]] = {
    "unknown instruction": ("0x30", b"NN0"),
    "doubling lists": ("twice", DOUBLING),
    "list in itself": ("twice", b"]" + put(0) + get(0) + b"a"),
    "dict in itself": ("twice", b"}" + put(0) + text("a") + get(0) + b"s"),
    "deep lists": ("deep", b"]" * 20_000 + b"a" * 19_999),
    "deep lists in marks": ("deep", b"](" * 20_000 + b"N" + b"e" * 20_000),
    "deep tuples": ("tuple", b")" + b"\x85" * 20_000),
    "101 dicts": ("deep", (b"}" + text("a")) * 101 + b"N" + b"s" * 101),
    "a tuple": ("tuple", b")"),
    "a name as a value": ("Global", STORAGE),
    "hooks as a value": ("object", Described().hooks),
    "an ordered dict": ("calls", b"ccollections\nOrderedDict\n]\x85R"),
    "a call of nothing": ("calls", b"N)R"),
    "a call without a tuple": ("calls", STORAGE + b"]R"),
    "a call of a storage": ("calls", STORAGE + b")R"),
    "a storage that is a list": ("storage", b"]Q"),
    "two results": ("ends", b"NN"),
    "an open mark": ("ends", b"N("),
    "open marks": ("deep", b"(" * 1000 + b"N"),
    "no result": ("ends", b""),
    "instructions after the last": ("ends", b"N.N"),
    "values before a mark": ("lacks", b"]N(a"),
    "no mark": ("lacks", b"]Ne"),
    "no value": ("lacks", b"]a"),
    "items of no list": ("list", b"NNa"),
    "items of no dict": ("dict", b"]" + text("a") + b"Ns"),
    "half an item": ("dict", b"}(" + text("a") + b"u"),
    "the same key twice": ("key", b"}(" + (text("a") + b"N") * 2 + b"u"),
    "bool as key": ("key", b"}\x88Ns"),
    "list as key": ("key", b"}]Ns"),
    "float as key": ("key", b"}G" + bytes(8) + b"Ns"),
    "keys of one hash": ("key", SAME_HASH),
    "string longer than the file": ("cut off", b"X\xff\xff\xff\xff"),
    "string not in UTF-8": ("UTF-8", b"X\1\0\0\0\xff"),
    "noted out of order": ("wrong index", b"NN" + put(1)),
    "noted too often": ("wrong index", b"N" + put(0) + put(1)),
    "nothing noted": ("wrong index", put(0)),
    "used before it is noted": ("twice", get(0)),
    "empty groups": ("values", b"]" + b"(e" * 50_001),
    "too many values": ("values", b"](" + b"N" * 50_001 + b"e"),
}

BIG = 1 << 30
UNTYPED = {"kind": b"ctorch.storage\nUntypedStorage\n", "numel": integer(8)}
NAMED = {"rebuild": b"ctorch._utils\n_rebuild_tensor_v3\n", "dtype": b"ctorch\nuint32\n"}

# A word of the message, and what is wrong with a tensor of two floats.
TENSORS: dict[str, tuple[str, dict[str, bytes]]] = {
    "overlapping": ("strides", {"shape": numbers(2, 2), "strides": numbers(1, 1)}),
    "stride 0": ("strides", {"shape": numbers(BIG), "strides": numbers(0)}),
    "gaps": ("strides", {"strides": numbers(2)}),
    "negative sizes": ("shape", {"shape": numbers(-1, -2), "strides": numbers(2, 1)}),
    "negative stride": ("strides", {"strides": numbers(-1)}),
    "sizes of 93 bits": (
        "shape",
        {"shape": numbers(0, *[2**31] * 3), "strides": numbers(*[1] * 4)},
    ),
    "stride of 70 bits": ("strides", {"shape": numbers(2, 1), "strides": numbers(1, 2**70)}),
    "65 sizes": ("shape", {"shape": numbers(2, *[1] * 64), "strides": numbers(*[1] * 65)}),
    "fewer strides": ("strides", {"shape": numbers(2, 1)}),
    "sizes in a list": ("shape", {"shape": b"](" + integer(2) + b"e"}),
    "size that is a bool": ("shape", {"shape": b"\x88\x85"}),
    "shape larger": ("size", {"shape": numbers(BIG)}),
    "shape smaller": ("size", {"shape": numbers(1)}),
    "storage larger": ("size", {"numel": integer(BIG)}),
    "both larger": ("size", {"shape": numbers(BIG), "numel": integer(BIG)}),
    "negative storage": ("size", {"shape": numbers(-2), "numel": integer(-2)}),
    "offset": ("tensor", {"offset": integer(1)}),
    "offset that is a bool": ("tensor", {"offset": b"\x89"}),
    "gradient": ("tensor", {"grad": b"\x88"}),
    "hooks": ("tensor", {"hooks": b"}"}),
    "no such entry": ("storage", {"key": text("1")}),
    "key that is an integer": ("storage", {"key": integer(0)}),
    "device": ("storage", {"device": text("cuda:0")}),
    "tag": ("storage", {"tag": text("module")}),
    "tag that is a list": ("storage", {"tag": b"]"}),
    "storage of a function": ("storage", {**UNTYPED, **NAMED, "kind": NAMED["rebuild"]}),
    "typed storage, named type": ("data type", NAMED),
    "untyped storage, no type": ("data type", UNTYPED),
    "untyped storage, a storage's name": ("data type", {**UNTYPED, **NAMED, "dtype": STORAGE}),
    "untyped storage, no name": ("tensor", {**UNTYPED, **NAMED, "dtype": b"N"}),
    "used twice": ("twice", {"after": put(0) + get(0)}),
    "as an item of itself": ("list", {"after": b"Na"}),
}


def compressed() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(1 << 22))
    return buffer.getvalue()


def shared(times: int) -> bytes:
    tensor = Described(shape=numbers(1 << 18), numel=integer(1 << 18))
    return around(b"\x80\2](" + tensor.code() * times + b"e.", bytes(1 << 20))


def entry(name: str) -> Entry:
    return Entry(f"archive/{name}", b"")


PICKLE = Entry("archive/data.pkl", b"\x80\2" + Described().code() + b".")
DATA = Entry("archive/data/0", bytes(8))
WIDE = DATA._replace(wide=True)
OTHER_FIELD: Any = {"size": 2**32 - 1, "extra": struct.pack("<2H2Q", 2, 16, 8, 8)}
LONG_NAME = struct.pack("<4s6H3I5H2I", b"PK\1\2", *[0] * 9, 200, *[0] * 6)
NAMED_DATA = DATA._replace(name="archive/data/x")
NAMED_KEY = PICKLE._replace(content=PICKLE.content.replace(text("0"), text("x")))

FILES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty": ("is empty", lambda: b""),
    "text": ("not a checkpoint", lambda: b"hello"),
    "text with brackets": ("not a checkpoint", lambda: b"(an aside)"),
    "image": ("not a checkpoint", lambda: b"\x89PNG\r\n\x1a\n" + bytes(100)),
    "start of a zip file": ("cut off", lambda: b"PK\3\4"),
    "zip file of another program": ("end", compressed),
    "protocol 3": ("protocol", lambda: around(pickle.dumps({"a": 1}, protocol=3))),
    "protocol 4": ("protocol", lambda: around(pickle.dumps({"a": 1}, protocol=4))),
    "no instruction": ("cut off", lambda: around(b"")),
    "no last instruction": ("cut off", lambda: around(b"\x80\2N")),
    "expanded tensor": ("strides", lambda: saved(torch.ones(1).expand(BIG))),
    "view": ("size", lambda: saved(torch.ones(9)[:2])),
    "named storage": ("described", lambda: zipped(NAMED_KEY, ORDER, NAMED_DATA)),
    "shared too often": ("share", lambda: shared(80)),
    "no entries": ("order", lambda: b"PK\3\4" + bytes(30) + zipped(before=34)),
    "comment": ("end", lambda: zipped(PICKLE, ORDER, DATA, comment=b"hello")),
    "bytes before": ("not a checkpoint", lambda: bytes(3) + zipped(PICKLE, ORDER, DATA, before=3)),
    "bytes at the start": ("order", lambda: b"PK\3\4" + zipped(PICKLE, ORDER, DATA, before=4)),
    "zip file before": ("order", lambda: zipped(DATA) + zipped(PICKLE, before=len(zipped(DATA)))),
    "bytes after": ("end", lambda: zipped(PICKLE, ORDER, DATA) + b"\0"),
    "bytes between": ("order", lambda: zipped(PICKLE, ORDER, DATA, between=bytes(30))),
    "same name twice": ("second", lambda: zipped(PICKLE, ORDER, DATA, DATA)),
    "unknown entry": ("code/x.py", lambda: zipped(PICKLE, ORDER, DATA, entry("code/x.py"))),
    "unused entry": ("data/1", lambda: zipped(PICKLE, ORDER, DATA, entry("data/1"))),
    "other archive": ("version", lambda: zipped(PICKLE, ORDER, DATA, Entry("version", b"3"))),
    "control characters": ("x1b", lambda: zipped(PICKLE, ORDER, DATA, entry("\x1b[2J"))),
    "long name": ("unknown", lambda: zipped(PICKLE, ORDER, DATA, entry("x" * 400))),
    "no pickle": ("data.pkl", lambda: zipped(ORDER, DATA)),
    "no byte order": ("byteorder", lambda: zipped(PICKLE, DATA)),
    "big-endian": ("endian", lambda: zipped(PICKLE, Entry("archive/byteorder", b"big"), DATA)),
    "compressed": ("compressed", lambda: zipped(PICKLE, ORDER, DATA._replace(method=8))),
    "encrypted": ("encrypted", lambda: zipped(PICKLE, ORDER, DATA._replace(flags=0x809))),
    "two stored sizes": ("compressed", lambda: zipped(PICKLE, ORDER, DATA._replace(stored=4))),
    "checksum": ("checksum", lambda: zipped(PICKLE, ORDER, DATA._replace(crc=1))),
    "checksum of the pickle": ("checksum", lambda: zipped(PICKLE._replace(crc=1), ORDER, DATA)),
    "two names": ("headers", lambda: zipped(PICKLE, ORDER, DATA._replace(local_name="archive/1"))),
    "entry in another": ("order", lambda: zipped(PICKLE, ORDER, DATA, VERSION._replace(offset=0))),
    "over the next": ("order", lambda: zipped(PICKLE, ORDER, DATA._replace(size=60), VERSION)),
    "over the directory": ("order", lambda: zipped(PICKLE, ORDER, DATA._replace(size=60))),
    "larger than the file": ("order", lambda: zipped(PICKLE, ORDER, DATA._replace(size=2**31))),
    "larger than any file": ("order", lambda: zipped(PICKLE, ORDER, WIDE._replace(size=2**63))),
    "after any end": ("order", lambda: zipped(PICKLE, ORDER, WIDE._replace(offset=2**63))),
    "two sizes": ("headers", lambda: zipped(PICKLE, ORDER, DATA._replace(local_size=9))),
    "field of another kind": ("field", lambda: zipped(PICKLE, ORDER, DATA._replace(**OTHER_FIELD))),
    "field of a record": ("field", lambda: zipped(PICKLE, ORDER, DATA._replace(extra=b"up\0\0"))),
    "half of a record": ("cut off", lambda: zipped(PICKLE, ORDER, DATA, directory_end=b"PK\1\2")),
    "record with a long name": ("cut off", lambda: zipped(PICKLE, ORDER, directory_end=LONG_NAME)),
    "record of another kind": ("cut off", lambda: zipped(PICKLE, ORDER).replace(b"PK\1", b"PK\4")),
    "fewer entries": ("order", lambda: zipped(PICKLE, ORDER, DATA, count=2)),
    "bytes after the directory": ("wrong size", lambda: zipped(PICKLE, after_directory=bytes(5))),
    "long record": ("wrong size", lambda: zipped(PICKLE, ORDER, directory_end=bytes(2000))),
    "many entries": ("wrong size", lambda: zipped(PICKLE, ORDER, *[DATA] * 100)),
}  # fmt: skip


def hostile_files() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """The words that a message must have, and the files."""
    cases: dict[str, tuple[str, Callable[[], bytes]]]
    cases = {f"code: {name}": ("code", make) for name, make in HOLDS_CODE.items()}
    for name, (word, body) in PICKLES.items():
        cases[f"pickle: {name}"] = (word, partial(around, b"\x80\2" + body + b"."))
    for name, (word, wrong) in TENSORS.items():
        cases[f"tensor: {name}"] = (word, Described(**wrong).file)
    return cases | {f"file: {name}": case for name, case in FILES.items()}


CASES = hostile_files()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", CASES)
def test_hostile_files_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word, make = CASES[name]
    content = make()
    taken = []
    real = torch.empty

    def empty(size: int, **options: Any) -> Tensor:
        taken.append(size)
        assert size <= 1 << 20, "memory was taken before sizes were checked"
        return real(size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(archive, "MAX_NODES", 50_000)
    monkeypatch.setattr(plain_pickle, "MAX_NODES", 50_000)
    monkeypatch.setattr(stored_zip, "MAX_ENTRIES", 50)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArchiveError, match=word) as caught:
        read(tmp_path, content)
    message = str(caught.value)
    assert caught.value.holds_code == name.startswith("code")
    assert len(message) < 150
    assert message.isprintable()
    assert str(tmp_path) not in message
    assert not (tmp_path / "executed").exists()
    assert sum(taken) <= len(content)


def test_a_large_structure_is_refused(
    tmp_path: Path, small: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "_MAX_PICKLE", 100)
    with pytest.raises(ArchiveError, match=r"data\.pkl has more than 100"):
        read(tmp_path, small)


def test_names_of_code_are_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"posix\.system|nt\.system"):
        read(tmp_path, HOLDS_CODE["os.system"]())


@pytest.fixture(scope="module")
def small() -> bytes:
    state = {"w": torch.arange(6.0).reshape(2, 3), "u": torch.ones(2, dtype=torch.uint16)}
    return saved({"format": 1, "state": {**state, "n": [1, 2.5, "a", None, 2**70], "e": {}}})


def outcome(folder: Path, content: bytes) -> Any:
    """What is read, or None where the file is refused."""
    try:
        return read(folder, content)
    except ArchiveError:
        return None


def test_cut_off_files_are_refused(tmp_path: Path, small: bytes) -> None:
    for length in range(0, len(small), 97):
        assert outcome(tmp_path, small[:length]) is None, length


def test_a_changed_byte_is_refused_or_harmless(tmp_path: Path, small: bytes) -> None:
    expected = read(tmp_path, small)
    rng = random.Random(1)
    refused = 0
    for position in range(0, len(small), 7):
        damaged = bytearray(small)
        damaged[position] ^= 1 << rng.randrange(8)
        result = outcome(tmp_path, bytes(damaged))
        assert result is None or differences(result, expected) == [], position
        refused += result is None
    assert refused > 100


def test_changed_pickles_raise_nothing_else(tmp_path: Path, small: bytes) -> None:
    """Random changes of the structure, with correct checksums."""
    with zipfile.ZipFile(io.BytesIO(small)) as file:
        original = file.read("archive/data.pkl")
        storages = [file.read(f"archive/data/{i}") for i in range(2)]
    assert_same(read(tmp_path, around(original, *storages)), read(tmp_path, small))
    instructions = b"".join(plain_pickle._INSTRUCTIONS)
    rng = random.Random(2)
    accepted = 0
    for _ in range(600):
        changed = bytearray(original)
        for _ in range(rng.choice((1, 1, 2, 5))):
            position = rng.randrange(2, len(changed))
            piece = rng.choice(
                (bytes([rng.choice(instructions)]), bytes([rng.randrange(256)]), b"", b"\xff" * 4)
            )
            changed[position : position + rng.choice((0, 1, 1, 4))] = piece
        result = outcome(tmp_path, around(bytes(changed), *storages))
        if result is not None:
            accepted += 1
            check_storable(result)
    assert 0 < accepted < 300


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_archive(tmp_path / "none.pt")
    with pytest.raises(ArchiveError, match="not a file"):
        read_archive(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(ArchiveError, match="not a file"):
        read_archive(tmp_path / "pipe.pt")


# --- What may be saved ---


def nested(depth: int) -> Any:
    value: Any = torch.ones(1)
    for i in range(depth):
        value = [value, 0] if i % 2 else {"a": value, "b": 0}
    return value


UNSTORABLE: dict[str, Any] = {
    "nested": nested(101),
    "more than": [0] * 2_000_000,
    "MiB": ["x" * (33 << 20)],
    "bits": [2**2040],
    "key": {2**63: 1},
    "bits8": torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    "65 dimensions": torch.zeros([1] * 65),
    "Parameter": torch.nn.Parameter(torch.ones(1)),
    "tuple": [(1, 2)],
    "share": [torch.ones(1 << 20)] * 30,
}


@pytest.mark.parametrize("reason", UNSTORABLE)
def test_what_cannot_be_read_again_is_not_storable(reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_storable(UNSTORABLE[reason])


def test_a_tree_as_deep_as_allowed(tmp_path: Path) -> None:
    check_storable(nested(100))
    assert_as_torch_reads(tmp_path, saved(nested(100)))
    with pytest.raises(ArchiveError, match="deep"):
        read(tmp_path, saved(nested(101)))


SIZED: dict[str, Any] = {
    "tensors": [torch.ones([1] * (i % 5)) for i in range(20)],
    "untyped": {str(i): torch.ones(3, dtype=torch.uint16) for i in range(20)},
    "empty dicts": [{} for _ in range(50)],
    "long dict": {str(i): i for i in range(1000)},
    "strings": ["a", "b"] * 40,
}


@pytest.mark.parametrize("name", SIZED)
def test_the_reader_counts_no_more_values_than_the_writer(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the smallest limit under which a tree may be saved, it can be read."""
    content = saved(SIZED[name])
    for limit in range(20, 5000):
        monkeypatch.setattr(archive, "MAX_NODES", limit)
        try:
            check_storable(SIZED[name])
        except ValueError:
            continue
        break
    monkeypatch.setattr(plain_pickle, "MAX_NODES", limit)
    assert_as_torch_reads(tmp_path, content)
    monkeypatch.setattr(plain_pickle, "MAX_NODES", limit // 3)
    with pytest.raises(ArchiveError, match="values"):
        read(tmp_path, content)


def test_limits_of_the_file_fit_those_of_the_tree() -> None:
    """As many tensors, and as much text, as a tree may hold fit into a file."""
    tensors = plain_pickle.MAX_NODES // archive._TENSOR_NODES
    assert tensors + len(archive._RECORDS) <= stored_zip.MAX_ENTRIES
    assert archive._MAX_PICKLE >= archive._MAX_TEXT + 12 * plain_pickle.MAX_NODES
