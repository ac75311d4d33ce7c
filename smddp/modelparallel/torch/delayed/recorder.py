"""Makes tensors without memory, and records what is done to them.

While a `Recorder` is active, each operation that makes a tensor makes a `Delayed` one. Operations
on delayed tensors are recorded at any time, because the class of the tensors makes the recorder
active again.

Random numbers are really drawn when an operation is recorded, into memory that is freed at once. So
the generators are afterwards where they would be without the recorder, whatever an operation draws.
Small results are kept; for others the state of the generator is, and the operation draws the same
numbers again when the tensor comes to life.

If code needs values (a number in a condition, a shape that depends on data), the recorded
operations are made at once, for this time only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import nn

from smddp._torch_internals import (
    PARAMETER_MARK,
    FakeTensor,
    FakeTensorMode,
    TreeSpec,
    forget_fakes,
    local_scalar_dense,
    operation_schema,
    storage_address,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.logs import frame_outside
from smddp.modelparallel.torch.common.placeholder import about
from smddp.modelparallel.torch.delayed.record import (
    Call,
    Constant,
    Geometry,
    Memory,
    Promise,
    Random,
    Value,
    generator_of,
    replay,
)

__all__ = ["Delayed", "Recorder", "attributes_of_code", "copies_made_by"]

_aten = torch.ops.aten
_DATA: Any = torch.Tensor.data
# The attribute of a delayed tensor that has its `Value`.
_VALUE = "_smp_value"

# Operations that make a tensor of random numbers -> those that write the same numbers into one.
_INTO = {
    _aten.rand.default: _aten.rand.out,
    _aten.rand.generator: _aten.rand.generator_out,
    _aten.randn.default: _aten.randn.out,
    _aten.randn.generator: _aten.randn.generator_out,
    _aten.randint.default: _aten.randint.out,
    _aten.randint.generator: _aten.randint.generator_out,
    _aten.randint.low: _aten.randint.low_out,
    _aten.randint.low_generator: _aten.randint.low_generator_out,
}
# Results of random operations up to this size are kept; the state of the CPU's generator has it.
_SMALL = 5056  # bytes

# Copies a tensor in place of `Delayed.__deepcopy__`.
_copier: Callable[[torch.Tensor], torch.Tensor] | None = None


@contextmanager
def copies_made_by(function: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """In this context `copy.deepcopy` copies delayed tensors by a function."""
    global _copier
    before, _copier = _copier, function
    try:
        yield
    finally:
        _copier = before


class Delayed(FakeTensor):
    """A tensor without memory, whose operations are recorded."""

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        """Returns a delayed copy. Copies of tensors that share memory share memory, too."""
        if id(self) not in memo:
            memo[id(self)] = _copied(self, memo) if _copier is None else _copier(self)
        return memo[id(self)]

    @property
    def data(self) -> Any:
        """The tensor without what autograd knows of it; see torch.Tensor."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, given: torch.Tensor) -> None:
        # No operation says this to the recorder.
        recorder = _recorder_of(self)
        if not isinstance(given, FakeTensor):
            given = recorder.delay(given, copy=None)
        _DATA.__set__(self, given)
        self.fake_device = given.fake_device  # type: ignore[attr-defined]
        self.__dict__[_VALUE] = recorder.value_of(given)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the values as an array; writing to it does not change the tensor."""
        return _values(self).numpy(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the values as an array."""
        return _values(self).numpy().__array__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is pickled as an ordinary tensor, with its values."""
        value: Any = _values(self)
        if isinstance(self, nn.Parameter):
            value = nn.Parameter(value, self.requires_grad)
        return value.__reduce_ex__(protocol)

    def data_ptr(self) -> NoReturn:
        """Raises SMPUsageError."""
        raise SMPUsageError(
            f"a tensor of shape {tuple(self.shape)} has no memory yet: its initialization is "
            "delayed until the model is divided"
        )


def _recorder_of(tensor: FakeTensor) -> Recorder:
    mode = tensor.fake_mode
    assert isinstance(mode, Recorder)
    return mode


def _values(tensor: Delayed) -> torch.Tensor:
    return _recorder_of(tensor).values([tensor])[0]


def _copied(tensor: Delayed, memo: dict[Any, Any]) -> torch.Tensor:
    if tensor.grad_fn is not None:
        raise RuntimeError("only tensors without grad_fn can be copied by copy.deepcopy")
    with torch.no_grad():
        if isinstance(tensor, nn.Parameter):
            copy: torch.Tensor = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
        else:
            storage = tensor.untyped_storage()
            place = ("storage", storage_address(storage))
            if place not in memo:
                count = storage.nbytes() // tensor.element_size()
                memo[place] = tensor.detach().as_strided((count,), (1,), 0).clone()
            whole = memo[place]
            if whole.dtype != tensor.dtype:
                whole = whole.view(tensor.dtype)
            copy = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            copy.requires_grad_(tensor.requires_grad)
    copy.__dict__.update(attributes_of_code(tensor))
    return copy


def attributes_of_code(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the attributes that code has given a delayed tensor, such as marks of a library."""
    own = _attributes_of_torch()
    return {name: value for name, value in tensor.__dict__.items() if name not in own}


@functools.cache
def _attributes_of_torch() -> set[str]:
    with FakeTensorMode():
        names = set(torch.empty(0).__dict__)
    return {*names, PARAMETER_MARK, _VALUE}


class Recorder(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The mode in which tensors are delayed.

    Attributes:
        settled: the model is divided. Delayed tensors that are left come to life when code uses
            them.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.settled = False
        self._making_shapes = False
        self._paused = False
        self._scratch: torch.UntypedStorage | None = None
        # By address of the storage that stands for it.
        self._memories: WeakValueDictionary[int, Memory] = WeakValueDictionary()

    @contextmanager
    def paused(self, pause: bool = True) -> Iterator[None]:
        """In this context new tensors are real ones; with False, they are delayed again."""
        before, self._paused = self._paused, pause
        try:
            yield
        finally:
            self._paused = before

    # --- values -----------------------------------------------------------------------------------

    def values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the present values of delayed tensors, in memory of their own."""
        with self.paused():
            return [self._real(tensor).clone() for tensor in tensors]

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the present values of a delayed tensor."""
        value = self.value_of(tensor)
        if value.memory.real is not None:
            return _on_storage(value.memory, value.geometry)
        return replay([value])[0]

    def come_to_life(self, tensor: torch.Tensor, shares: bool = True) -> torch.Tensor:
        """Returns a real tensor for a delayed one.

        Args:
            tensor: the delayed one.
            shares: let real tensors for one memory share memory; it is kept until the end of the
                delay. Otherwise it belongs to this tensor alone, if there is none yet.
        """
        self._scratch = None
        value = self.value_of(tensor)
        with self.paused():
            if value.memory.real is None:
                (real,) = replay([value])
                if shares:
                    value.memory.real = real.untyped_storage()
                return real
            return _on_storage(value.memory, value.geometry)

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Returns the value of a delayed tensor.

        Raises:
            SMPUsageError: something has changed the tensor that is no operation of torch.
        """
        value: Value | None = tensor.__dict__.get(_VALUE)
        if value is None or not value.fits(tensor):
            raise _refusal(tensor, "something has changed it that is not an operation of torch")
        return value

    def _memory_of(self, tensor: torch.Tensor) -> Memory:
        _check_kind(tensor)
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage_address(storage))
        if memory is None:
            memory = self._memories[storage_address(storage)] = Memory(storage)
        return memory

    # --- operations -------------------------------------------------------------------------------

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Is called by torch for each operation."""
        kwargs = dict(kwargs or {})
        if self._making_shapes:
            return super().dispatch(func, types, args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        if any(isinstance(leaf, FakeTensor) and leaf.fake_mode is not self for leaf in leaves):
            targets = {id(one) for one in _written(func, args, kwargs)}
            leaves = [self._own(leaf, id(leaf) in targets) for leaf in leaves]
            args, kwargs = tree_unflatten(leaves, spec)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        delayed = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if not delayed and func is _aten.lift_fresh.default and not self._paused:
            return self.delay(tensors[0])
        if not delayed and (self._paused or tensors or _wants_meta(kwargs)):
            return func(*args, **kwargs)
        for tensor in delayed:
            self.value_of(tensor)
        written = _written(func, args, kwargs)
        if self.settled and delayed:
            return self._run(func, leaves, spec, written)
        reads = func is local_scalar_dense or about(func).reads
        if reads or any(not isinstance(one, FakeTensor) for one in written):
            return self._on_values(func, leaves, spec)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random and written and about(func).overwrites:
            return self._draw_in_place(func, leaves, spec)
        state = self._draw(func, leaves, spec, kwargs) if random else None
        if isinstance(state, torch.Tensor):
            return state
        try:
            result = self._shape(func, types, args, kwargs)
        except Exception:
            if written:
                if not all(one is args[0] for one in written):
                    raise
                result = args[0]
            else:
                # An operation that fails on shapes alone may succeed on values; else its own error
                # is raised.
                found = self._on_values(func, leaves, spec)
                return tree_map_only(torch.Tensor, self.delay, found)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if made or written:
            self._record(func, leaves, spec, written, made, state)
        return result

    def _own(self, leaf: Any, written: bool) -> Any:
        """Returns what to take for a delayed tensor of another recorder.

        That is the real one if it is left from another model; else a delayed copy, as of the
        entries of a checkpoint.
        """
        if not isinstance(leaf, FakeTensor) or leaf.fake_mode is self:
            return leaf
        mode = leaf.fake_mode
        if isinstance(mode, Recorder) and mode.settled:
            return mode.come_to_life(leaf)
        if not isinstance(mode, Recorder) or written:
            raise _refusal(leaf, "tensors of another fake mode are used with it")
        return self.delay(leaf)

    def _shape(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Makes an operation on shapes."""
        self._making_shapes = True
        try:
            result = super().dispatch(func, types, args, kwargs)
        finally:
            self._making_shapes = False
            forget_fakes(self)
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                leaf.constant = None
                if type(leaf) is FakeTensor:
                    leaf.__class__ = Delayed
        return result

    def _record(
        self,
        func: Any,
        leaves: Sequence[Any],
        spec: TreeSpec,
        written: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        random: Random | None,
    ) -> None:
        """Records an operation whose arguments and results are given."""
        kept: list[Any] = list(leaves)
        for place, leaf in enumerate(kept):
            if isinstance(leaf, FakeTensor):
                kept[place] = _before(leaf)
            elif isinstance(leaf, torch.Tensor):
                kept[place] = Constant(leaf)
        overwrites = False
        if written and about(func).overwrites:
            value = _before(written[0])
            others = [one for one in kept[1:] if isinstance(one, Value)]
            overwrites = value.geometry.covers(value.memory.storage.nbytes()) and all(
                one.memory is not value.memory for one in others
            )
        views = not written and bool(func.is_view)
        call = Call(func, kept, spec, overwrites, views, random, _place())
        for tensor in written:
            memory = _before(tensor).memory
            if call not in memory.writers[-1:]:
                memory.writers.append(call)
        for tensor in made:
            before: Value | None = tensor.__dict__.get(_VALUE)
            value = Value(self._memory_of(tensor), Geometry.of(tensor), call)
            if before is not None and before.same(value):
                value = before
            if not value.memory.writers:
                value.memory.writers.append(call)
            tensor.__dict__[_VALUE] = value
            call.results.append(value)

    def delay(self, real: torch.Tensor, copy: bool | None = True) -> Any:
        """Returns a delayed tensor with the values of a real one, or of one of another recorder.

        Args:
            real: the real one.
            copy: copy the values of a real one now; otherwise they must not change, see `Constant`.
        """
        _check_kind(real)
        given = _before(real) if isinstance(real, FakeTensor) else Constant(real, copy)
        return self._copy_of(given, real, real.device)

    def promise(self, make: Callable[[], torch.Tensor], like: torch.Tensor, device: Any) -> Any:
        """Returns a delayed tensor with the values of one that a function makes.

        Args:
            make: is called whenever the values are needed.
            like: has the shape, strides and dtype of what it returns, on any device.
            device: of what it returns.
        """
        return self._copy_of(Promise(make), like, device)

    def _copy_of(self, given: Value | Constant, like: torch.Tensor, device: Any) -> Any:
        shape = (list(like.shape), list(like.stride()))
        options = {"dtype": like.dtype, "device": device}
        tensor: torch.Tensor = self._shape(_aten.empty_strided.default, (), shape, options)
        memory, geometry = self._memory_of(tensor), Geometry.of(tensor)
        leaves, spec = tree_flatten(((given,), {}))
        call = Call(_aten.clone.default, leaves, spec, False, False, None, _place())
        memory.writers.append(call)
        value = tensor.__dict__[_VALUE] = Value(memory, geometry, call)
        call.results.append(value)
        return tensor

    def _real_arguments(self, leaves: Sequence[Any]) -> list[Any]:
        return [self._real(leaf) if isinstance(leaf, FakeTensor) else leaf for leaf in leaves]

    def _on_values(self, func: Any, leaves: Sequence[Any], spec: TreeSpec) -> Any:
        """Makes an operation on the present values of delayed tensors."""
        with self.paused():
            args, kwargs = tree_unflatten(self._real_arguments(leaves), spec)
            return func(*args, **kwargs)

    def _run(
        self, func: Any, leaves: list[Any], spec: TreeSpec, written: Sequence[torch.Tensor]
    ) -> Any:
        """Makes an operation on delayed tensors that are left once the model is divided."""
        for leaf in leaves:
            if isinstance(leaf, FakeTensor) and leaf.grad_fn is not None:
                raise _refusal(leaf, "it was computed from parameters, with gradients enabled")
        alive = [
            self.come_to_life(leaf) if isinstance(leaf, FakeTensor) else leaf for leaf in leaves
        ]
        args, kwargs = tree_unflatten(alive, spec)
        result = func(*args, **kwargs)
        if written and result is args[0]:
            return leaves[0]
        return result

    # --- random numbers ---------------------------------------------------------------------------

    def _draw_in_place(self, func: Any, leaves: list[Any], spec: TreeSpec) -> torch.Tensor:
        """Records an operation that fills a tensor with random numbers; draws them."""
        target: torch.Tensor = leaves[0]
        with self.paused():
            scratch = self._scratch_like(target)
            generator = _generator(leaves, target.device)
            state = generator.get_state()
            args, kwargs = tree_unflatten([scratch, *self._real_arguments(leaves[1:])], spec)
            func(*args, **kwargs)
        if scratch.nbytes <= _SMALL:
            leaves, spec = tree_flatten(((target, scratch), {}))
            self._record(_aten.copy_.default, leaves, spec, [target], [target], None)
        else:
            random = Random(state, generator.device)
            self._record(func, leaves, spec, [target], [target], random)
        return target

    def _draw(
        self, func: Any, leaves: list[Any], spec: TreeSpec, kwargs: Mapping[str, Any]
    ) -> Random | torch.Tensor:
        """Draws the numbers of an operation.

        Returns:
            The state from before it; or a delayed tensor with the numbers if there are few.
        """
        device = next((one.device for one in leaves if isinstance(one, torch.Tensor)), None)
        generator = _generator(leaves, device or torch.device(kwargs.get("device") or "cpu"))
        state = generator.get_state()
        if func in _INTO:
            with self.paused():
                args = tree_unflatten(leaves, spec)[0]
                scratch = self._scratch_like(self._shape(func, (), args, kwargs))
                own = {"generator": kwargs["generator"]} if "generator" in kwargs else {}
                drawn = _INTO[func](*args, **own, out=scratch)
        else:
            drawn = self._on_values(func, leaves, spec)
        one = isinstance(drawn, torch.Tensor) and not operation_schema(func).is_mutable
        if one and drawn.nbytes <= _SMALL:
            kept: torch.Tensor = self.delay(drawn)
            return kept
        return Random(state, generator.device)

    def _scratch_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a real tensor of the geometry of a delayed one, without values.

        Large ones use the same memory again and again. If they had memory of their own, small
        tensors would come to lie between them, and the system would not get the memory back.
        """
        shape, strides, dtype = tensor.shape, tensor.stride(), tensor.dtype
        if tensor.device.type != "cpu" or tensor.nbytes <= _SMALL:
            return torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device)
        steps = zip(shape, strides, strict=True)
        size = dtype.itemsize * (1 + sum((n - 1) * step for n, step in steps))
        if self._scratch is None or self._scratch.nbytes() < size:
            self._scratch = None
            self._scratch = torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()
        empty = torch.empty(0, dtype=dtype, device="cpu")
        return empty.set_(self._scratch, 0, shape, strides)


def _before(tensor: torch.Tensor) -> Value:
    """Returns the value that a tensor had before the operation that is being recorded.

    The operation may have changed its memory or geometry.
    """
    value: Value = tensor.__dict__[_VALUE]
    return value


def _on_storage(memory: Memory, geometry: Geometry) -> torch.Tensor:
    """Returns the tensor of a geometry in the real storage of a memory."""
    real = memory.real
    assert real is not None
    whole = torch.empty(0, dtype=geometry.dtype, device=real.device)
    if real.nbytes() != memory.storage.nbytes():
        raise _refusal(whole, "its memory has not the size that was expected")
    return whole.set_(real, geometry.offset, geometry.shape, geometry.strides)


def _check_kind(tensor: torch.Tensor) -> None:
    """Raises SMPUsageError if tensors of this kind cannot be delayed."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise _refusal(tensor, "it is sparse, nested or quantized")


def _refusal(tensor: torch.Tensor, why: str) -> SMPUsageError:
    shape = "" if tensor.is_nested else f" of shape {tuple(tensor.shape)}"
    return SMPUsageError(
        f"the initialization of a tensor{shape} ({_place()}) cannot be delayed, because {why}: "
        "create its module outside smp.delay_param_initialization, or within "
        "smp.delay_param_initialization(enabled=False)"
    )


def _wants_meta(kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that an operation writes to."""
    if not operation_schema(func).is_mutable:
        return []
    found: list[torch.Tensor] = []
    for place, argument in enumerate(operation_schema(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _generator(leaves: Sequence[Any], device: torch.device) -> torch.Generator:
    given = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    return given if given is not None else generator_of(device)


def _place() -> str:
    """Returns file and line of the code outside torch that is running."""
    frame = frame_outside(sys._getframe(1), ("torch", "smddp.modelparallel.torch.delayed"))
    if frame is not None:
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "unknown place"
