"""The compiled module (csrc/bindings)."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypedDict

import torch
import torch._C._distributed_c10d

class AlgorithmUse(TypedDict):
    calls: int
    bytes: int
    memory_bytes: int
    fabric_bytes: int
    zero_copy: int

class Setting(TypedDict):
    name: str
    type: str
    value: str
    default: str
    doc: str
    from_environment: bool
    expert: bool

class BuildInfo(TypedDict):
    version: str
    torch: str
    simd: str
    no_libfabric: str  # why libfabric cannot be used; empty if it can

class CongestionControl(TypedDict):
    system: str
    on_short_paths: str
    text: str  # what connections have, and why
    hindered: bool  # something better, or what was asked for, is not allowed

class ProcessGroup(torch._C._distributed_c10d.Backend):
    def __init__(
        self,
        store: torch._C._distributed_c10d.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        algorithm: str = "",
        wire: str = "",
        ranks_of_world: Sequence[int] = (),
    ) -> None: ...
    def describe(self) -> str: ...
    def abort_because(self, reason: str) -> None: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...
    def statistics(self) -> dict[str, AlgorithmUse]: ...

# Also serves GPU tensors; docs in csrc/process_group/device/gpu_process_group.h.
class GpuProcessGroup(ProcessGroup):
    def __init__(
        self,
        store: torch._C._distributed_c10d.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        algorithm: str,
        wire: str,
        ranks_of_world: Sequence[int],
        device_type: str,
        name_of: Callable[[int], str],
        make_nccl: Callable[
            [torch._C._distributed_c10d.Store, int, int, timedelta],
            torch._C._distributed_c10d.Backend,
        ]
        | None,
    ) -> None: ...
    # "host", "nccl", or empty before the first collective on GPU tensors.
    def gpu_path(self) -> str: ...

# Messages between the ranks of a group; docs in csrc/process_group/mailbox.h.
class CallOrder:
    def run(self, callback: Callable[..., Any], *arguments: Any) -> Any: ...

def order_of(work: torch._C._distributed_c10d.Work) -> CallOrder | None: ...

class ControlGroups:
    def __init__(self, own: str = ..., groups: str = ...) -> None: ...
    def folders(self, controller: str) -> list[str]: ...
    def available_memory(self) -> int | None: ...
    def available_threads(self) -> int | None: ...

class Mailbox:
    def __init__(self, group: ProcessGroup) -> None: ...
    def open(self) -> None: ...
    # Returns messages as (sender's rank, header, tensors, is it the last, error of the stream).
    def take(
        self, block: bool
    ) -> list[tuple[int, bytes, list[torch.Tensor | None], bool, Exception | None]]: ...
    def interrupt(self) -> None: ...
    def send(
        self, peer: int, header: bytes, tensors: Sequence[torch.Tensor | None], last: bool
    ) -> None: ...
    def flush(self) -> None: ...

# From torch 2.15 on; docs in csrc/process_group/elastic_members.h.
class Members:
    generation: int
    rank: int
    cards: list[str]
    step: int
    left: list[str]
    came: list[str]
    out: str

class ElasticMembers:
    def __init__(self, group: ProcessGroup, grace: float = 9.0) -> None: ...
    def card(self) -> str: ...
    def begin(self, cards: Sequence[str], step: int = 0, timeout: float = 60.0) -> Members: ...
    def join(self, cards: Sequence[str], timeout: float) -> Members: ...
    def hear(self, card: str) -> None: ...
    def newcomers(self) -> int: ...
    def agree(self, committed: int, voted: int, timeout: float) -> Members: ...

# The bytes of a message; docs in csrc/process_group/message_codec.h. Returns the front, a uint8
# tensor of at least `least` bytes, and the bytes of each large tensor, which share its memory.
def encode_message(
    header: bytes, tensors: Sequence[torch.Tensor | None], last: bool, least: int
) -> tuple[torch.Tensor, list[torch.Tensor]]: ...

# How many bytes a front has; it begins with these.
def front_length(begin: torch.Tensor) -> int: ...

# Header, tensors, and where the bytes of the large ones have to be received, in order.
def decode_front(
    front: torch.Tensor,
) -> tuple[bytes, list[torch.Tensor | None], list[torch.Tensor]]: ...
def empty(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

# A number in [0, below) from torch's default CPU generator.
def random_number(below: int) -> int: ...
def shutdown() -> None: ...

# Waits for what torch's tools do after a failure; False after SMDDP_DUMP_SECONDS, or if a signal
# has ended a wait before.
def finish_hooks() -> bool: ...

# Raises SystemExit in their Python code.
def end_hooks() -> None: ...
def report_trouble(
    store: torch._C._distributed_c10d.Store,
    name: str,
    rank: int,
    job_rank: int,
    is_usage: bool,
    is_signal: bool,
    text: str,
) -> None: ...
def settings() -> list[Setting]: ...

# Also where settings() raises, because a value is wrong.
def setting_names() -> list[str]: ...
def build_info() -> BuildInfo: ...

# Where processes of other nodes connect to this one: numeric.
def address_for_peers() -> str: ...

# Of TCP sockets between nodes.
def congestion_control() -> CongestionControl: ...

# Gives a socket what data connections have; before and after it is connected.
def set_congestion_control(socket: int) -> None: ...
def set_error_types(types: dict[str, Any]) -> None: ...

# Rows of (collective, algorithm, layouts that it supports, when it is chosen).
def list_algorithms() -> list[tuple[str, str, str, str]]: ...
def print_plan(
    collective: str,
    bytes: int,
    nodes: Sequence[Sequence[int]],
    rank: int,
    root: int,
    shared: bool,
    algorithm: str,
    wire: str,
) -> str: ...
def check_plan(
    collective: str,
    bytes: int,
    nodes: Sequence[Sequence[int]],
    root: int,
    shared: bool,
    algorithm: str,
    wire: str,
) -> str: ...
