"""Parameters and buffers that live on another rank.

Such a tensor keeps its shape and dtype, and has no memory: it is on the device "meta". In a step,
code that reads it gets the values from their owner, by a call that returns them, so a gradient goes
back the same way. Outside a step no rank would answer, so each rank works on what it has. Whatever
is computed there from a remote tensor is empty, too; so code that treats all parameters or buffers
alike runs on every rank. To ask for the values raises an error that names the tensor.

The forward method of a module may change a buffer, and put another tensor in its place. So the
shape and the dtype of a buffer are asked for in a step, too, and the dict of a module's buffers is
a `RemoteBuffers`, which sees each access.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from smddp._torch_internals import (
    AVERAGED_MODEL,
    BACKWARD,
    FUNCTIONAL_CALL,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common.buffers import version_of
from smddp.modelparallel.torch.common.placeholder import WITHOUT, About, Placeholder, force

__all__ = [
    "Home",
    "RemoteBuffer",
    "RemoteBuffers",
    "RemoteParameter",
    "RemoteTensor",
    "ValueReader",
    "force_argument",
    "give_values",
    "patch_torch",
    "release_memory",
    "retype",
    "stand_in_for",
    "values_of",
]


class ValueReader:
    """Reads the values of a remote tensor. This class is for copies, which have no values."""

    def in_step(self) -> bool:
        """Says whether this thread runs code of a step, so that values can be fetched."""
        return False

    def in_order(self) -> bool:
        """Says whether the microbatches of this step run one after the other."""
        return False

    def moment(self) -> Any:
        """Returns where the code stands now, for `values`; see `Frame.moment`."""

    def values(self, moment: Any) -> Any:
        """Returns the values, a lazy tensor; None if the owner has no tensor there.

        Args:
            moment: when the code has taken the tensor from its module; None if that is not known.
        """
        raise NotImplementedError

    def same_tensor(self) -> Any:
        """Returns the present values of a buffer; None if code has ever replaced its tensor."""


_NOTHING = ValueReader()


class Home(NamedTuple):
    """Where a tensor lives.

    Attributes:
        kind: "parameter" or "buffer".
        name: of the tensor in the model.
        owner: rank of the pipeline.
        device: of what lives on this rank.
        reader: reads the values.
        copied: it is a copy of the model's tensor, as `copy.deepcopy` makes.
    """

    kind: str
    name: str
    owner: int
    device: torch.device
    reader: ValueReader
    copied: bool = False

    def copy(self) -> Home:
        """Returns the home of a copy."""
        return self._replace(copied=True, reader=_NOTHING)

    def error(self) -> SMPUsageError:
        """Returns the error for code that needs the values where it cannot get them."""
        if self.copied:
            return SMPUsageError(
                f"this is a copy of {self.kind} {self.name!r}, which lives on rank {self.owner} of "
                "the pipeline, and so does its copy there. A copy of the model has on each rank "
                f"only what lives there. Copy its {self.kind}s back into the model's, on all "
                "ranks, and call the model"
            )
        return SMPUsageError(
            f"{self.kind} {self.name!r} lives on rank {self.owner} of the pipeline, and this rank "
            "does not have its values. Read it within a function decorated with smp.step; or use "
            f"model.state_dict(), which gathers all values; or model.local_{self.kind}s() for what "
            "lives here"
        )

    def refusal(self, name: str) -> SMPUsageError:
        """Returns the error for code in a step that would change the values.

        Args:
            name: of the function that would change them.
        """
        return SMPUsageError(
            f"{self.kind} {self.name!r} lives on rank {self.owner} of the pipeline: {name} would "
            "change a copy of it only. Change it in the forward method of its module, or outside "
            "the step on all ranks"
        )


class RemoteTensor(Placeholder):
    """A tensor of a module on another rank.

    Attributes:
        home: where it lives.
        moment: when it was taken from its module, see `ValueReader.values`; None for parameters,
            which are always the same tensor.
    """

    home: Home
    moment: Any = None

    def resolved(self) -> Any:
        """Returns the values in a step; outside, the tensor itself."""
        return force(_lazily(self)) if self.home.reader.in_step() else self

    def called(self, known: About, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function of torch with the values if they can be fetched, else without."""
        home = self.home
        in_step, is_buffer = home.reader.in_step(), home.kind == "buffer"
        if in_step and known.of_gradients and not is_buffer:
            _refuse_unseen(home, known, args, kwargs)
        if known.describes and not (in_step and known.form and is_buffer):
            if known.name == "device" and in_step:
                return home.device
            return super().called(known, func, args, kwargs)
        if func is torch.autograd.grad and in_step and not is_buffer:
            return _gradients(*args, **kwargs)
        if func is torch.autograd.grad:
            raise SMPUsageError(
                f"torch.autograd.grad cannot return the gradient of {home.kind} {home.name!r}, "
                f"which lives on rank {home.owner} of the pipeline: call model.backward, and read "
                "its `grad` on that rank after the step"
            )
        if not in_step:
            return _without_values(home, known, func, args, kwargs)
        return _with_values(known, func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        """Returns another empty tensor."""
        if id(self) not in memo:
            memo[id(self)] = _hollow(self, self.home.copy())
        copied: RemoteTensor = memo[id(self)]
        return copied


class RemoteParameter(RemoteTensor, nn.Parameter):
    """A parameter of a module on another rank."""


class RemoteBuffer(RemoteTensor):
    """A buffer of a module on another rank.

    In a step `RemoteBuffers` returns another `RemoteBuffer` in its place, which knows when it was
    taken from its module.

    Attributes:
        taken: the one that was returned last; None before.
    """

    taken: RemoteBuffer | None = None


class RemoteBuffers(dict[str, Any]):
    """The `_buffers` of a module, if some of them live on another rank.

    In a step, access to a place without a tensor asks the owner, whose code may have put one there.
    If the microbatches run one after the other, access to any place does, because then modules may
    put tensors there or take them away (see `ModelRuntime.begin_step`). In a step an assignment
    raises; outside a step it leaves an empty tensor here.
    """

    def __init__(
        self,
        entries: Mapping[str, Any],
        homes: dict[str, Home],
        make_home: Callable[[str], Home] | None,
    ) -> None:
        """Copies the entries of a module.

        Args:
            entries: its buffers, by name; those that live elsewhere are `RemoteBuffer`s.
            homes: of those that live elsewhere.
            make_home: returns the home of a new buffer; None if the module itself lives here.
        """
        super().__init__(entries)
        self._homes = homes
        self._make_home = make_home

    def home(self, name: str) -> Home | None:
        """Returns where a buffer lives; None if it is here."""
        if name not in self._homes and name not in self and self._make_home is not None:
            self._homes[name] = self._make_home(name)
        return self._homes.get(name)

    def raw(self, name: str) -> Any:
        """Returns what is in a place on this rank."""
        return super().get(name)

    def put(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """Gives a remote buffer the shape and dtype that its owner has told."""
        home = self.home(name)
        assert home is not None
        before = self.raw(name)
        if before is None or (before.shape, before.dtype) != (shape, dtype):
            fresh = torch.empty(shape, dtype=dtype, device="meta")
            super().__setitem__(name, _hollow(fresh, home))

    def clear_place(self, name: str) -> None:
        """Leaves a place of a remote buffer without a tensor."""
        assert self.home(name) is not None
        super().__setitem__(name, None)

    def release_memory(self) -> None:
        """Frees the memory of the remote buffers again."""
        for name, home in self._homes.items():
            tensor = self.raw(name)
            if tensor is not None and not isinstance(tensor, RemoteTensor):
                release_memory(tensor, home)

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        home = self._homes.get(name)
        if home is None or not home.reader.in_step():
            return found
        if found is None or home.reader.in_order():
            # There may be a tensor by now, or none any more.
            value = force(home.reader.values(home.reader.moment()))
            if value is None or found is None:
                return value if value is None else _ReadValues(home, value).view(value)
        # All names of one buffer give the same object, because some code finds shared buffers by
        # identity.
        moment = home.reader.moment()
        if found.taken is None or found.taken.moment is not moment:
            found.taken = _hollow(found, home)
            found.taken.moment = moment
        return found.taken

    def __setitem__(self, name: str, value: Any) -> None:
        home = self.home(name)
        if home is not None:
            if home.reader.in_step():
                raise home.refusal("an assignment")
            if value is not None:
                value = _hollow(value, home)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        home = self._homes.get(name)
        if home is not None and home.reader.in_step():
            raise home.refusal("del")
        super().__delitem__(name)

    def items(self) -> Any:
        """Returns (name, buffer) pairs."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """Returns the buffers."""
        return [self[name] for name in self]

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {name: copy.deepcopy(self.raw(name), memo) for name in self}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, ({name: self.raw(name) for name in self},)


class _ReadValues:
    """Values of a remote tensor that were read in a step, and that views may share.

    Attributes:
        home: where the tensor lives.
    """

    def __init__(self, home: Home, values: torch.Tensor) -> None:
        self.home = home
        self._values = values
        self._moment = home.reader.moment()

    def view(self, value: torch.Tensor) -> _RemoteView:
        """Returns a tensor that shares memory with the values as a `_RemoteView`."""
        with WITHOUT():
            view = value.as_subclass(_RemoteView)
        view.read = self
        return view

    def is_of(self, result: torch.Tensor) -> bool:
        """Says whether a tensor shares memory with the values."""
        one, other = result, self._values
        if one.layout != torch.strided or other.layout != torch.strided or not one.numel():
            return False
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()

    def check(self) -> None:
        """Raises if the buffer has been changed in place since, because its views have not been.

        If a step changes buffers that other ranks read, its microbatches run one after the other;
        other steps need no check.

        Raises:
            SMPUsageError: the buffer has been changed.
        """
        reader = self.home.reader
        if self.home.kind != "buffer" or not (reader.in_step() and reader.in_order()):
            return
        if self._moment is reader.moment():
            return
        now = force(reader.same_tensor())
        if now is not None and not (
            now.shape == self._values.shape and torch.equal(now, self._values)
        ):
            raise SMPUsageError(
                f"buffer {self.home.name!r} lives on rank {self.home.owner} of the pipeline. A "
                "view of it was taken before a later call of a module that changed it, and does "
                "not show the change. Take the view where the values are needed, or a clone()"
            )
        self._moment = reader.moment()


class _RemoteView(Placeholder):
    """A view of values that were read in a step; to change it raises.

    Attributes:
        read: the values.
    """

    read: _ReadValues

    @property
    def home(self) -> Home:
        """Where the tensor lives."""
        return self.read.home

    def resolved(self) -> torch.Tensor:
        """Returns the view as an ordinary tensor."""
        self.read.check()
        with WITHOUT():
            return self.as_subclass(torch.Tensor)

    ordinary = resolved

    def called(self, known: About, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function of torch with the values."""
        if known.describes or func in (torch.autograd.grad, torch.autograd.backward):
            return super().called(known, func, args, kwargs)
        return _with_values(known, func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(force(self), memo)


class _EmptyResult(Placeholder):
    """What was computed from a remote tensor outside a step: a tensor without values."""

    home: Home

    def called(self, known: About, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function of torch without values."""
        return _without_values(self.home, known, func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = _marked(self.home, self.ordinary())
        return copied


def release_memory(tensor: torch.Tensor, home: Home) -> None:
    """Frees the memory of a tensor, which becomes a `RemoteTensor`; the object stays."""
    _refuse_gradients(tensor, home)
    hollow = _hollow(tensor, home)
    hollow.__dict__.update(tensor.__dict__)
    hollow.home = home
    tensor.grad = None
    try:
        with WITHOUT():
            torch.utils.swap_tensors(tensor, hollow)  # type: ignore[no-untyped-call]
    except RuntimeError:
        # There are weak references to it, as in recurrent layers. Its memory can still be freed:
        # one element, NaN if possible, stands for all of them.
        if tensor.layout == torch.strided:
            value = float("nan") if tensor.is_floating_point() else 0
            one = torch.full((1,) * tensor.dim(), value, dtype=tensor.dtype)
            tensor.data = one.to(tensor.device).expand(tensor.shape)
        tensor.__class__ = type(hollow)
        tensor.home = home  # type: ignore[attr-defined]


def give_values(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a tensor values; a remote one becomes an ordinary one, the object stays."""
    if not isinstance(tensor, RemoteTensor):
        tensor.data = value
        return
    plain = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
    with WITHOUT():
        fresh: Any = value.detach().requires_grad_(tensor.requires_grad)
        if plain is nn.Parameter:
            fresh = nn.Parameter(value, tensor.requires_grad)
        own = {name: item for name, item in tensor.__dict__.items() if name != "home"}
        fresh.__dict__.update(own)
        try:
            torch.utils.swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
        except RuntimeError:
            tensor.__class__ = plain  # type: ignore[assignment]
            tensor.data = value


def retype(tensor: RemoteTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Gives a remote tensor the dtype that a function, as in `half()`, gives its argument."""
    with WITHOUT():
        probe = function(torch.empty(0, dtype=tensor.dtype, device=tensor.home.device))
        if probe.dtype != tensor.dtype:
            tensor.data = tensor.data.to(probe.dtype)


def values_of(tensor: Any) -> Any:
    """Returns what a call of another rank gets for a tensor: the values of a remote one, lazily.

    Raises:
        SMPUsageError: the tensor was computed outside the step from a remote one, without values.
    """
    if isinstance(tensor, RemoteTensor):
        if not tensor.home.reader.in_step():
            raise tensor.home.error()
        return _lazily(tensor)
    if type(tensor) is _EmptyResult:
        raise tensor.home.error()
    return force(tensor) if type(tensor) is _RemoteView else tensor


def force_argument(value: Any) -> Any:
    """Returns what a local module gets for an argument.

    That is the values of a lazy tensor or a parameter. A buffer stays what it is: the module would
    otherwise change a copy of it, and nobody would notice.
    """
    return value if isinstance(value, RemoteBuffer | _RemoteView) else force(value)


def patch_torch() -> None:
    """Replaces functions of torch that do not look at `__torch_function__`, for remote tensors.

    `AveragedModel` averages on each rank what lives there. If its copy is from before the first
    step, the copy has everything; what lives elsewhere becomes empty in it, too, because there is
    nothing to average it with. `backward(inputs=…)` and `torch.func.functional_call` raise for
    remote tensors.
    """
    AVERAGED_MODEL.install(_averaging)
    BACKWARD.install(_refusing_inputs)
    FUNCTIONAL_CALL.install(_refusing_modules)  # scripts have imported what calls it


def _averaging(original: Any) -> Any:
    @functools.wraps(original)
    def update_parameters(self: Any, model: nn.Module) -> None:
        averages = itertools.chain(self.module.parameters(), self.module.buffers())
        originals = itertools.chain(model.parameters(), model.buffers())
        for average, one in zip(averages, originals, strict=False):
            if isinstance(one, RemoteTensor) and not isinstance(average, RemoteTensor):
                release_memory(average, one.home.copy())
        original(self, model)

    return update_parameters


def _refusing_inputs(original: Any) -> Any:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        inputs = kwargs.get("inputs", args[5] if len(args) > 5 else None)
        for one in tree_leaves(inputs) if inputs is not None else ():
            if isinstance(one, RemoteTensor):
                home = one.home
                raise SMPUsageError(
                    f"backward(inputs=…) cannot reach {home.kind} {home.name!r}, which lives on "
                    f"rank {home.owner} of the pipeline: call model.backward(loss), and read its "
                    "`grad` on that rank after the step. For parameters that shall get no "
                    "gradient, call requires_grad_(False) on all ranks before the step"
                )
        original(*args, **kwargs)

    return backward


def _refusing_modules(original: Any) -> Any:
    @functools.wraps(original)
    def functional_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for part in module.modules():
            for tensor in (*part._parameters.values(), *dict.values(part._buffers)):
                if isinstance(tensor, RemoteTensor):
                    home = tensor.home
                    raise SMPUsageError(
                        f"functional_call of a {type(module).__name__}: its {home.kind} "
                        f"{home.name!r} lives on rank {home.owner} of the pipeline, where other "
                        "values would not take effect. Before the first step, assign the module to "
                        "the partition from which it is called, 0 for the body: "
                        "smp.set_partition(module, 0)"
                    )
        return original(module, *args, **kwargs)

    return functional_call


def _gradients(outputs: Any, inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, ...]:
    """Calls `torch.autograd.grad`, which asks other ranks for parameters; see passes.py."""
    zeros = kwargs.pop("materialize_grads", False)
    if zeros:
        kwargs["allow_unused"] = True
    outputs, kwargs = tree_map(force, (outputs, kwargs))
    stand_ins = [_stand_in(one) if isinstance(one, RemoteTensor) else one for one in inputs]
    found = torch.autograd.grad(outputs, stand_ins, **kwargs)
    if not zeros:
        return found
    return tuple(
        torch.zeros_like(one, device=getattr(one, "home", one).device)
        if gradient is None
        else gradient
        for one, gradient in zip(stand_ins, found, strict=True)
    )


def _stand_in(parameter: RemoteTensor) -> torch.Tensor:
    with WITHOUT():
        stand_in = parameter.ordinary().requires_grad_(parameter.requires_grad)
    stand_in.home = parameter.home  # type: ignore[attr-defined]
    return stand_in


def stand_in_for(tensor: Any) -> Home | None:
    """Returns the home of the parameter that a tensor stands for in a pass; None for others."""
    home: Home | None = tensor.__dict__.get("home") if type(tensor) is torch.Tensor else None
    return home


def _lazily(value: Any) -> Any:
    if isinstance(value, RemoteTensor):
        return value.home.reader.values(value.moment)
    return value


def _refuse_unseen(home: Home, known: About, args: Any, kwargs: Any) -> None:
    """Raises if code in a step lets a parameter have other gradients, or does more with them."""
    name = known.name
    if name == "requires_grad" and not known.changes:
        return
    if name in ("requires_grad", "requires_grad_"):
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        with WITHOUT():
            if args[0].requires_grad == wanted:
                return
        call = f"{name.rstrip('_')} = {wanted}"
    else:
        call = f"{name}()"
    raise SMPUsageError(
        f"{home.kind} {home.name!r} lives on rank {home.owner} of the pipeline, where {call} in "
        "a step would not take effect: do it between steps, on all ranks"
    )


def _with_values(known: About, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of torch with the values; raises if it changes them."""
    if known.changes:
        for one in tree_leaves(args[:1]):
            if isinstance(one, RemoteTensor | _RemoteView):
                raise one.home.refusal(known.name)
    leaves, spec = tree_flatten((args, kwargs))
    # All calls first, so that they join one call graph.
    found = list(map(_lazily, leaves))
    found = list(map(force, found))
    reads, values = [], []
    for leaf, value in zip(leaves, found, strict=True):
        if isinstance(leaf, RemoteTensor | _RemoteView):
            if value is None:
                raise leaf.home.error()
            reads.append(
                leaf.read if isinstance(leaf, _RemoteView) else _ReadValues(leaf.home, value)
            )
            values.append(value)
    versions = list(map(version_of, values))
    before = [value.clone() for value in values] if known.changes_unseen else values
    args, kwargs = tree_unflatten(found, spec)
    result = func(*args, **kwargs)
    for read, value, version, old in zip(reads, values, versions, before, strict=True):
        if version_of(value) != version or not (value is old or torch.equal(value, old)):
            raise read.home.refusal(known.name)
    return tree_map(functools.partial(_protected, reads), result)


def _protected(reads: list[_ReadValues], result: Any) -> Any:
    """Returns a result of a function; as a `_RemoteView` if it is a view of remote values."""
    if type(result) is torch.Tensor:
        for read in reads:
            if read.is_of(result):
                return read.view(result)
    return result


def _without_values(home: Home, known: About, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of torch on empty tensors; raises if it needs values."""
    if known.reads:
        raise home.error()
    try:
        with WITHOUT():
            result = func(*args, **kwargs)
    except Exception as error:
        if "meta" not in str(error).lower():
            raise
        raise home.error() from error
    return tree_map(functools.partial(_marked, home), result)


def _marked(home: Home, value: Any) -> Any:
    """Returns a tensor as a `_EmptyResult`; other values unchanged."""
    if type(value) is not torch.Tensor:
        return value
    with WITHOUT():
        marked = value.as_subclass(_EmptyResult)
    marked.home = home
    return marked


def _hollow(tensor: torch.Tensor, home: Home) -> RemoteTensor:
    """Returns a new `RemoteTensor` of the same shape, strides and dtype, without memory."""
    with WITHOUT():
        if tensor.layout == torch.strided:
            shape = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        else:
            shape = torch.empty(
                tensor.size(), dtype=tensor.dtype, layout=tensor.layout, device="meta"
            )
        hollow: RemoteTensor
        if home.kind == "parameter":
            hollow = RemoteParameter(shape, tensor.requires_grad)
        else:
            # Not `as_subclass`, which sparse tensors do not have.
            shape.__class__ = RemoteBuffer
            hollow = cast(RemoteBuffer, shape)
            hollow.requires_grad_(tensor.requires_grad)
    hollow.home = home
    return hollow


def _refuse_gradients(tensor: torch.Tensor, home: Home) -> None:
    """Makes backward passes raise that reach a tensor by a use before it became empty."""
    if not tensor.requires_grad:
        return

    def refuse(_: Any) -> None:
        raise SMPUsageError(
            f"{home.kind} {home.name!r}, which lives on rank {home.owner} of the pipeline, was "
            "used in the body before the first call of the model in the first step: call the model "
            "first"
        )

    torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(refuse)
