"""The safetensors format: a JSON header, then the bytes of the tensors.

Reading such a file never runs code. Source: github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from smddp.modelparallel.core.errors import SMPUsageError

__all__ = ["read", "write"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")


def write(
    stream: IO[bytes], entries: Mapping[str, Any], values: Iterable[Any] | None = None
) -> None:
    """Writes tensors by name.

    Args:
        stream: to write to.
        entries: dense tensors of any shape and device, of the dtypes of `_DTYPES`.
        values: what to write, in the order of `entries`, of which only shapes and dtypes count
            then; taken one after the other, so not all need be in memory. None for `entries`.

    Raises:
        SMPUsageError: an entry is not a tensor, or has another dtype.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in entries.items():
        if not isinstance(value, torch.Tensor) or value.dtype not in _NAMES:
            raise SMPUsageError(f"{name!r} cannot be saved as safetensors: use another file name")
        begin, end = end, end + value.numel() * value.element_size()
        header[name] = {
            "dtype": _NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(_LENGTH.pack(len(text)) + text)
    for tensor in entries.values() if values is None else values:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        stream.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        del tensor, flat  # before the next one comes


def read(file: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file by name.

    The file stays mapped into memory as long as one of them lives. Changing a tensor does not
    change the file.

    Raises:
        ValueError: the file is damaged.
    """
    size = file.stat().st_size
    try:
        with open(file, "rb") as stream:
            # ACCESS_COPY: changes of a tensor stay in memory.
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        (length,) = _LENGTH.unpack_from(data)
        header = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        header.pop("__metadata__", None)
        begin = _LENGTH.size + length
        return {name: _tensor(data, begin, size, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"{file} is not a safetensors file, or is damaged: {error}") from None


def _tensor(data: mmap.mmap, begin: int, size: int, entry: Mapping[str, Any]) -> torch.Tensor:
    first, last = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    count = (last - first) // dtype.itemsize
    if not 0 <= first <= last <= size - begin or count != torch.Size(shape).numel():
        raise ValueError(f"a tensor of shape {shape} at {first}:{last} does not fit")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8, count=last - first, offset=begin + first)
    # The offset need not be a multiple of the item size.
    aligned = (begin + first) % dtype.itemsize == 0
    return (raw if aligned else raw.clone()).view(dtype).reshape(shape)
