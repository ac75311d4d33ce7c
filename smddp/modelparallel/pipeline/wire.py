"""How a message looks on the wire.

A message is a fixed-size envelope, then what did not fit into it: the rest of the header, and each
large tensor by itself, uncopied. Most messages of a small model are one envelope.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["ENVELOPE", "Message", "decode", "encode"]

ENVELOPE = 8192
# Below this a tensor is copied into the envelope; above, it travels alone.
_INLINE = 4096
_LENGTHS = struct.Struct("<II")
_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Message(NamedTuple):
    """What one rank tells another.

    Attributes:
        kind: see `Kind` in protocol.py.
        header: anything that pickles and holds no tensors.
        tensors: values; an entry may be None (no gradient). Whether a tensor requires a gradient
            is preserved, its graph is not.
    """

    kind: int
    header: Any
    tensors: list[torch.Tensor | None]


def encode(message: Message) -> list[torch.Tensor]:
    """Returns the byte tensors to send, in order; the first is the envelope."""
    metas: list[Any] = []
    inline: list[bytes] = []
    large: list[torch.Tensor] = []
    room = ENVELOPE // 2
    for tensor in message.tensors:
        if tensor is None:
            metas.append(None)
            continue
        data = _sendable(tensor)
        size = data.nbytes
        small = size <= min(_INLINE, room)
        metas.append((_code(tensor), tuple(tensor.shape), tensor.requires_grad, small))
        if small:
            room -= size
            # Without torch: a dozen of its calls would cost more than the copy.
            inline.append(ctypes.string_at(data.data_ptr(), size))
        else:
            large.append(data.detach().reshape(-1).view(torch.uint8))
    body = pickle.dumps((int(message.kind), message.header, metas), pickle.HIGHEST_PROTOCOL)
    values = b"".join(inline)
    front = _LENGTHS.pack(len(body), len(values)) + body + values
    envelope = bytearray(ENVELOPE)
    envelope[: min(len(front), ENVELOPE)] = front[:ENVELOPE]
    rest = [_bytes(front[ENVELOPE:])] if len(front) > ENVELOPE else []
    return [torch.frombuffer(envelope, dtype=torch.uint8), *rest, *large]


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as plain contiguous host memory; usually itself."""
    if tensor.device.type != "cpu":
        if tensor.is_meta:
            raise RuntimeError(
                "a parameter that lives on another rank cannot be sent from this one"
            )
        return tensor.detach().cpu().contiguous()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def decode(envelope: torch.Tensor, receive: Callable[[int], torch.Tensor]) -> Message:
    """Returns the message that begins with an envelope; `receive(n)` gets the next n bytes."""
    header_size, values_size = _LENGTHS.unpack(envelope[: _LENGTHS.size].numpy().tobytes())
    total = _LENGTHS.size + header_size + values_size
    front = envelope.numpy().tobytes()[:total]
    if total > ENVELOPE:
        front += receive(total - ENVELOPE).numpy().tobytes()
    at = _LENGTHS.size + header_size
    kind, header, metas = pickle.loads(memoryview(front)[_LENGTHS.size : at])
    tensors: list[torch.Tensor | None] = []
    for meta in metas:
        if meta is None:
            tensors.append(None)
            continue
        code, shape, requires_grad, small = meta
        dtype = _DTYPES[code]
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        if not small:
            data = receive(size)
        elif size:
            data = _bytes(front[at : at + size])
            at += size
        else:
            data = torch.empty(0, dtype=torch.uint8)
        tensors.append(data.view(dtype).reshape(shape).requires_grad_(requires_grad))
    return Message(kind, header, tensors)


def _code(tensor: torch.Tensor) -> int:
    try:
        return _CODES[tensor.dtype]
    except KeyError:
        raise TypeError(f"smp cannot send tensors of {tensor.dtype} between ranks") from None


def _bytes(data: bytes) -> torch.Tensor:
    # From a bytearray: tensors over bytes would be read-only memory that looks writable.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
