"""An interpreter for the part of pickle that plain values and tensors need; it imports nothing.

Pickle is a small stack language that can import and call anything. Dicts, lists, numbers, strings
and tensors need 30 of its instructions. All others are refused, names in a file are compared with
a table, and sizes are checked before memory is allocated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_training.stored_zip import ArchiveError, Entry, damaged, quote

MAX_DEPTH = 100  # nested containers; the digest recurses, and Python allows 1,000 nested calls
MAX_NODES = 2_000_000  # values on the stack: at about 100 bytes each, 200 MB of Python objects
_MAX_NAME = 256  # bytes of a module's and a function's name
MAX_DIMS = 64  # as many as torch's own operations allow
_MAX_NUMEL = 2**63 - 1  # torch counts elements in signed 64 bits

_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
}
_UNTYPED = "torch.storage.UntypedStorage"
# Data types without a storage class of their own; not every torch from 2.6 on has the last two.
_NEW_DTYPES = (
    *("uint16", "uint32", "uint64", "complex32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_UNTYPED_DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": getattr(torch, name) for name in _NEW_DTYPES if hasattr(torch, name)
}
DTYPES = {*_STORAGES.values(), *_UNTYPED_DTYPES.values()}
_REBUILD = "torch._utils._rebuild_tensor_v2"  # from a typed storage
_REBUILD_UNTYPED = "torch._utils._rebuild_tensor_v3"  # from an untyped storage and a data type
_ORDERED_DICT = "collections.OrderedDict"  # a tensor's hooks, always empty
_GLOBALS = {*_STORAGES, *_UNTYPED_DTYPES, _UNTYPED, _REBUILD, _REBUILD_UNTYPED, _ORDERED_DICT}


def is_key(key: Any) -> bool:
    """Return whether a dict may have this key; longer integers could all be given the same hash."""
    return type(key) is str or (type(key) is int and -(2**63) <= key < 2**63)


class _Global(NamedTuple):
    """A name in a pickle ("torch.FloatStorage"). It is compared with a table, never imported."""

    name: str


class _Storage(NamedTuple):
    dtype: torch.dtype | None  # None: untyped
    content: Tensor


_NO_HOOKS = object()
_UINT1, _UINT2, _UINT4 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I")
_INT4, _FLOAT8 = struct.Struct("<i"), struct.Struct(">d")


class PlainUnpickler:
    """Runs the instructions of ``data.pkl`` on a stack of values.

    Only strings and names can be used twice (``get``), so that the result is a tree: no list or
    dict appears twice or contains itself.
    """

    def __init__(self, code: bytes, entries: dict[str, Entry]) -> None:
        self.storages: dict[str, Tensor] = {}  # memory by entry name, filled later
        self._entries = entries
        self._code = code
        self._position = 0
        self._nodes = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []  # stack positions at which groups of values start
        self._memo: list[Any] = []

    def run(self) -> Any:
        """Return the value that the pickle describes."""
        if self.take(2) != b"\x80\x02":
            raise ArchiveError("is not a checkpoint (its pickle is not of protocol 2)")
        while (code := self.take(1)) != b".":
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise damaged(f"unknown instruction 0x{code.hex()}")
            instruction(self)
        if self._position != len(self._code) or len(self._stack) != 1 or self._marks:
            raise damaged("its pickle ends in a wrong place")
        return self._stack[0]

    def take(self, size: int) -> bytes:
        """Return the next bytes of the pickle."""
        end = self._position + size
        if end > len(self._code):
            raise damaged("its pickle is cut off")
        part = self._code[self._position : end]
        self._position = end
        return part

    def number(self, kind: struct.Struct) -> Any:
        """Return the next number."""
        return kind.unpack(self.take(kind.size))[0]

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._count()
        self._stack.append(value)

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise damaged(f"it has more than {MAX_NODES:,} values")

    def pop(self, count: int) -> list[Any]:
        """Remove and return the last values, all from after the last mark."""
        start = len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise damaged("an instruction lacks its values")
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def mark(self) -> None:
        """Start a group: one for each open container, and two more inside a tensor."""
        if len(self._marks) >= MAX_DEPTH + 2:
            raise damaged(f"dicts and lists are nested more than {MAX_DEPTH} deep")
        self._marks.append(len(self._stack))

    def pop_group(self) -> list[Any]:
        """Remove the last mark, and remove and return the values after it."""
        if not self._marks:
            raise damaged("an instruction lacks its values")
        values = self.pop(len(self._stack) - self._marks[-1])
        self._marks.pop()
        if not values:  # ends a dict of a multiple of 1,000 items; counted, to limit them
            self._count()
        return values

    def put(self, index: int) -> None:
        """Store the last value under ``index``. Indices must be consecutive."""
        if index != len(self._memo) or index >= self._nodes or not self._stack:
            raise damaged("a value is stored under a wrong index")
        self._memo.append(self._stack[-1])

    def get(self, index: int) -> None:
        """Push a stored string or name."""
        if index >= len(self._memo) or type(self._memo[index]) not in (str, _Global):
            raise damaged("a value appears twice")
        self.push(self._memo[index])

    def text(self) -> None:
        """Push a string."""
        try:
            self.push(self.take(self.number(_UINT4)).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise damaged("a string is not UTF-8") from None

    def extend(self, items: list[Any]) -> None:
        """Append items to the list below them on the stack."""
        (target,) = self.pop(1)
        if type(target) is not list:
            raise damaged("a list is missing")
        target += items
        self._stack.append(target)

    def update(self, items: list[Any]) -> None:
        """Add alternating keys and values to the dict below them on the stack."""
        (target,) = self.pop(1)
        if type(target) is not dict or len(items) % 2:
            raise damaged("a dict is missing")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not is_key(key) or key in target:
                raise damaged("a dict has a wrong key")
            target[key] = value
        self._stack.append(target)

    def name(self) -> None:
        """Push the name of a class or function, if it is in the table."""
        lines = self._code[self._position : self._position + _MAX_NAME].split(b"\n")[:2]
        name = b".".join(lines).decode("utf-8", "replace")
        if name not in _GLOBALS:
            raise ArchiveError(f"contains code ({quote(name)}) and was not opened", holds_code=True)
        self.take(len(name) + 1)  # both lines
        self.push(_Global(name))

    def call(self) -> None:
        """Push the result of a call: a tensor, or an empty dict of hooks."""
        function, arguments = self.pop(2)
        if type(function) is not _Global or type(arguments) is not tuple:
            raise damaged("it calls what is not a function")
        if function.name == _ORDERED_DICT and not arguments:
            self.push(_NO_HOOKS)
        elif (function.name, len(arguments)) in ((_REBUILD, 6), (_REBUILD_UNTYPED, 7)):
            self.push(_make_tensor(*arguments))
        else:
            raise damaged("it calls a function in a wrong way")

    def storage(self) -> None:
        """Push the storage that ("storage", class, key, device, number of elements) describes."""
        (description,) = self.pop(1)
        types = (str, _Global, str, str, int)
        if type(description) is not tuple or tuple(map(type, description)) != types:
            raise damaged("a storage is described wrongly")
        tag, kind, key, device, numel = description
        name = f"data/{key}"
        if (tag, device) != ("storage", "cpu") or not (key.isdecimal() and name in self._entries):
            raise damaged("a storage is described wrongly")
        if kind.name != _UNTYPED and kind.name not in _STORAGES:
            raise damaged("a storage is described wrongly")
        dtype = _STORAGES.get(kind.name)
        size = self._entries[name].size
        if numel * (dtype.itemsize if dtype else 1) != size:
            raise damaged("a storage and its entry differ in size")
        if name not in self.storages:
            try:
                self.storages[name] = torch.empty(size, dtype=torch.uint8, device="cpu")
            except RuntimeError:
                raise ArchiveError(f"does not fit into memory ({size:,} bytes)") from None
        self.push(_Storage(dtype, self.storages[name]))


def _make_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, *names: Any
) -> Tensor:
    """Return the tensor of a storage; for an untyped storage the arguments contain the dtype."""
    if type(storage) is not _Storage or any(type(name) is not _Global for name in names):
        raise damaged("a tensor is described wrongly")
    dtype = _UNTYPED_DTYPES.get(names[0].name) if names else storage.dtype
    if dtype is None or (names and storage.dtype):
        raise damaged("a tensor has a wrong data type")
    if type(offset) is not int or offset or grad is not False or hooks is not _NO_HOOKS:
        raise damaged("a tensor is described wrongly")
    if not _is_dense(shape, strides):
        raise damaged("a tensor has a wrong shape or strides")
    if math.prod(shape) * dtype.itemsize != storage.content.nbytes:
        raise damaged("a tensor and its storage differ in size")
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    return tensor.set_(storage.content.untyped_storage(), 0, shape, strides)


def _is_dense(shape: Any, strides: Any) -> bool:
    """Return whether elements are contiguous without overlap, in any order of dimensions."""
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
        return False
    if len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape + strides):
        return False
    if math.prod(max(n, 1) for n in shape) > _MAX_NUMEL or max(strides, default=0) > _MAX_NUMEL:
        return False
    steps = sorted((stride, n) for stride, n in zip(strides, shape, strict=True) if n > 1)
    expected = [math.prod(n for _, n in steps[:i]) for i in range(len(steps))]
    return 0 in shape or [stride for stride, _ in steps] == expected


_INSTRUCTIONS: dict[bytes, Callable[[PlainUnpickler], None]] = {
    # Constants.
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    # Integers of 1, 2 and 4 bytes, integers preceded by their length, floats.
    b"K": lambda m: m.push(m.number(_UINT1)),
    b"M": lambda m: m.push(m.number(_UINT2)),
    b"J": lambda m: m.push(m.number(_INT4)),
    b"\x8a": lambda m: m.push(int.from_bytes(m.take(m.number(_UINT1)), "little", signed=True)),
    b"G": lambda m: m.push(m.number(_FLOAT8)),
    # Strings, preceded by their length.
    b"X": PlainUnpickler.text,
    # New containers.
    b"}": lambda m: m.push({}),
    b"]": lambda m: m.push([]),
    b")": lambda m: m.push(()),
    # Marks. Tuples of all values since a mark, or of the last 1, 2 or 3 (only inside tensors).
    b"(": PlainUnpickler.mark,
    b"t": lambda m: m.push(tuple(m.pop_group())),
    b"\x85": lambda m: m.push(tuple(m.pop(1))),
    b"\x86": lambda m: m.push(tuple(m.pop(2))),
    b"\x87": lambda m: m.push(tuple(m.pop(3))),
    # Items for a list or a dict: one, or all since a mark.
    b"a": lambda m: m.extend(m.pop(1)),
    b"e": lambda m: m.extend(m.pop_group()),
    b"s": lambda m: m.update(m.pop(2)),
    b"u": lambda m: m.update(m.pop_group()),
    # Values stored under an index of 1 or 4 bytes, and used again.
    b"q": lambda m: m.put(m.number(_UINT1)),
    b"r": lambda m: m.put(m.number(_UINT4)),
    b"h": lambda m: m.get(m.number(_UINT1)),
    b"j": lambda m: m.get(m.number(_UINT4)),
    # Names, calls and storages: what tensors are made of.
    b"c": PlainUnpickler.name,
    b"R": PlainUnpickler.call,
    b"Q": PlainUnpickler.storage,
}
