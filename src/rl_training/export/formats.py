"""Writing and opening the files of each format."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from rl_training.errors import ConfigError, UserError
from rl_training.export.module import PolicyModule
from rl_training.export.parity import Run
from rl_training.export.signature import BATCH
from rl_training.types import Array

FormatName: TypeAlias = Literal["onnx", "torch", "safetensors"]
FILES: dict[str, str] = {
    "onnx": "policy.onnx",
    "torch": "policy.pt2",
    "safetensors": "policy.safetensors",
}
"""Name of the file of each format."""
_PACKAGES = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "torch": (),
    "safetensors": ("safetensors",),
}
_TRACED_ROWS = 3


def require_packages(name: str) -> None:
    """Raise `ConfigError` if a package of the extra is not installed."""
    missing = [one for one in _PACKAGES[name] if importlib.util.find_spec(one) is None]
    if missing:
        raise ConfigError(
            f"format {name} needs {', '.join(missing)}, of the extra 'export'; in the clone:"
            " pip install '.[export]'"
        )


def packages_of(name: str) -> tuple[str, ...]:
    """Return the packages that write and run a format, besides torch."""
    return _PACKAGES[name]


def write_torch(module: PolicyModule, path: Path) -> None:
    """Write a program of `torch.export`."""
    with _quiet():
        torch.export.save(_traced(module), path)


def write_onnx(module: PolicyModule, path: Path) -> None:
    """Write an ONNX model whose inputs and outputs are those of the module's signature."""
    import onnx

    signature = module.signature
    program = _traced(module)
    with _quiet():
        try:
            made: Any = torch.onnx.export(
                program,
                input_names=[port.name for port in signature.inputs],
                output_names=[port.name for port in signature.outputs],
                dynamo=True,
                verbose=False,
            )
        except Exception as error:
            raise UserError(f"torch.onnx cannot convert this network: {_first(error)}") from error
        model = made.model_proto
    _name_batch(model.graph)
    for node in model.graph.node:  # the operations of torch that it was converted from
        node.ClearField("metadata_props")
    onnx.save(model, path)


def _name_batch(graph: Any) -> None:
    """Give the first dimension of inputs and outputs a name that says what it is."""
    found = {value.type.tensor_type.shape.dim[0].dim_param for value in graph.input}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in found - {""}:
                dimension.dim_param = BATCH


def open_torch(module: PolicyModule, path: Path) -> Run:
    """Return what runs a program that was just written; not for files of other people."""
    with _quiet():
        program = torch.export.load(path).module()
    signature = module.signature

    @torch.no_grad()
    def run(inputs: dict[str, Array]) -> dict[str, Array]:
        outputs = program(*(torch.from_numpy(inputs[port.name]) for port in signature.inputs))
        pairs = zip(signature.outputs, outputs, strict=True)
        return {port.name: output.numpy() for port, output in pairs}

    return run


def open_onnx(module: PolicyModule, path: Path) -> Run:
    """Return what runs an ONNX model in ONNX Runtime, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [port.name for port in module.signature.outputs]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def _traced(module: PolicyModule) -> Any:
    """Return the module as a program for batches of any size."""
    examples = []
    for port in module.signature.inputs:
        dtype: torch.dtype = getattr(torch, port.dtype)
        examples.append(torch.ones((_TRACED_ROWS, *port.shape), dtype=dtype))
    batch = torch.export.Dim(BATCH, min=1)
    with _quiet(), torch.no_grad():
        try:
            program = torch.export.export(
                module,
                tuple(examples),
                dynamic_shapes=(tuple({0: batch} for _ in examples),),
                strict=False,
            )
        except Exception as error:
            raise UserError(
                f"torch.export cannot trace this network: {_first(error)}. A network of your own"
                " must consist of torch operations, without control flow that depends on values,"
                " and take batches of any size"
            ) from error
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of torch's exporter on its own internals."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
