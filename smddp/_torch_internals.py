"""Every private name of torch that smddp uses, and every function of torch that it replaces.

Whoever supports a new release of torch reads this file; CONTRIBUTING.md has the steps. All other
modules take from here what torch does not document. `tests/python/test_torch_internals.py` checks
that, and that the installed torch has everything.

*Names.* `_name` finds one when this module is imported, so its users pay nothing for a call. If the
release does not have it, an `_Absent` class takes its place: nothing fails until a feature uses it,
and then `TorchInternalError` says which name is missing, in which release, and what needs it.
`_reader` is the same for an attribute of objects: it returns a function of C that reads it.

*Patches.* A `Patch` replaces one function, and puts the original back. `undo` does that for all
patches of an owner: `smp.shutdown` for those of smp. If another library has replaced the function
since, its replacement stays, and goes on to call that of smddp, which then does what the original
does; a later install leaves both as they are.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import TreeSpec as TreeSpec

# --- how names are found --------------------------------------------------------------------------


class TorchInternalError(ImportError):
    """The installed torch lacks a name that is not documented, and that a feature needs."""


class Entry(NamedTuple):
    """A private name of torch.

    Attributes:
        feature: what needs it; completes "… needs it".
        remedy: what to do when a release of torch does not have it; for developers.
        value: what users of this module get.
        example: makes an object that has the attribute, if the class does not show it.
    """

    feature: str
    remedy: str
    value: Any
    example: Callable[[], Any] | None = None


NAMES: dict[str, Entry] = {}
"""By path, such as "torch.Tensor._base"."""


class _Absent(type):
    """The class of what takes the place of a missing name. Any use raises TorchInternalError.

    Classes can be derived from it; only making an instance of them raises.
    """

    sentence: str

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise TorchInternalError(cls.sentence)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python asks whether it has methods of a protocol
            raise AttributeError(name)
        raise TorchInternalError(cls.sentence)

    def __instancecheck__(cls, value: Any) -> bool:
        if cls.__bases__ == (object,):
            raise TorchInternalError(cls.sentence)
        return False  # there are no instances of classes derived from it


def is_absent(value: Any) -> bool:
    """Says whether the installed torch lacks a name of this module."""
    return isinstance(value, _Absent)


def _sentence(path: str, feature: str) -> str:
    return (
        f"smddp: torch {torch.__version__} has no {path}, and {feature} needs it: use a release of "
        "torch that this release of smddp supports (README.md), or a newer smddp"
    )


def _absent(path: str, feature: str) -> Any:
    return _Absent(path.rpartition(".")[2], (), {"sentence": _sentence(path, feature)})


_MISSING = AttributeError, ImportError


def _look(path: str, example: Callable[[], Any] | None = None) -> Any:
    """Returns what a path from torch leads to; all others look through this one.

    Args:
        path: such as "torch.nn.Module".
        example: see Entry.

    Raises:
        AttributeError: it leads nowhere.
        ImportError: it leads nowhere.
    """
    if example is not None:
        return getattr(example(), path.rpartition(".")[2])
    value: Any = torch
    so_far = "torch"
    for part in path.split(".")[1:]:
        so_far = f"{so_far}.{part}"
        if inspect.ismodule(value) and not hasattr(value, part):
            try:
                value = importlib.import_module(so_far)
            except ModuleNotFoundError as error:
                raise AttributeError(so_far) from error
        else:
            value = getattr(value, part)
    return value


def _first(*paths: str, example: Callable[[], Any] | None = None) -> str:
    """Returns the first path that leads to something, for names that releases spell differently.

    Args:
        paths: that of the newest release first.
        example: see Entry.
    """
    for path in paths:
        with contextlib.suppress(*_MISSING):
            _look(path, example)
            return path
    return paths[0]


def _name(path: str, feature: str, remedy: str) -> Any:
    try:
        value = _look(path)
    except _MISSING:
        value = _absent(path, feature)
    NAMES[path] = Entry(feature, remedy, value)
    return value


def _reader(path: str, feature: str, remedy: str, example: Callable[[], Any] | None = None) -> Any:
    """Returns a function that reads an attribute of an object.

    Args:
        path: of the attribute in its class.
        feature: see Entry.
        remedy: see Entry.
        example: see Entry.
    """
    value: Any = operator.attrgetter(path.rpartition(".")[2])
    try:
        _look(path, example)
    except _MISSING:
        value = _absent(path, feature)
    NAMES[path] = Entry(feature, remedy, value, example)
    return value


def _noted(path: str, feature: str, remedy: str, example: Callable[[], Any] | None = None) -> None:
    """Notes a name whose use looks for it itself, because to look here would take too long."""
    NAMES[path] = Entry(feature, remedy, None, example)


# --- containers: torch.utils._pytree --------------------------------------------------------------

_CALLS = "smp, for calls of modules on another rank,"
_DELAY = "smp.delay_param_initialization"
_TREES = (
    "find where torch keeps its pytree now. Only lists, tuples, dicts and classes that a script "
    "has registered with torch matter"
)

tree_map = _name("torch.utils._pytree.tree_map", _CALLS, _TREES)
tree_leaves = _name("torch.utils._pytree.tree_leaves", _CALLS, _TREES)
tree_flatten = _name("torch.utils._pytree.tree_flatten", _CALLS, _TREES)
tree_unflatten = _name("torch.utils._pytree.tree_unflatten", _CALLS, _TREES)
tree_map_only = _name("torch.utils._pytree.tree_map_only", _DELAY, _TREES)
if not TYPE_CHECKING:
    TreeSpec = _name("torch.utils._pytree.TreeSpec", _DELAY, _TREES)

# --- tensors that are not what they seem ----------------------------------------------------------

DisableTorchFunctionSubclass = _name(
    "torch._C.DisableTorchFunctionSubclass",
    "smp, for tensors of other ranks and sharded parameters,",
    "a context in which functions do not call __torch_function__ of subclasses, but that of modes; "
    "torch.Tensor.__torch_function__ enters it, too",
)
make_wrapper_subclass = _name(
    "torch.Tensor._make_wrapper_subclass",
    _CALLS,
    "a Lazy tensor needs a shape, no memory, and its class; see lazy.py",
)
set_backward_hooks = _name(
    "torch.Tensor._backward_hooks.__set__",
    _CALLS,
    "it stores hooks in a tensor without a call of Tensor.register_hook, which would read it",
)
post_accumulate_grad_hooks = _reader(
    "torch.Tensor._post_accumulate_grad_hooks",
    "smp, to give a parameter other memory,",
    "hooks have to stay when a parameter gets other memory; see `without_hooks`",
)
backward_hooks_of_tensor = _reader(
    "torch.Tensor._backward_hooks",
    "smp, to give a parameter other memory,",
    "hooks have to stay when a parameter gets other memory; see `without_hooks`",
)
version_of_tensor = _reader(
    "torch.Tensor._version",
    "smp, to see changes in place,",
    "the number of changes in place, which autograd compares when it uses a saved tensor",
)
base_of_view = _reader(
    "torch.Tensor._base",
    "smp.DistributedOptimizer, to see whether a step combines parameters,",
    "the tensor of which a tensor is a view",
)
has_compatible_type = _name(
    "torch._has_compatible_shallow_copy_type",
    "smp, to move parameters to a device,",
    "it says whether `tensor.data = value` works; torch.nn.Module._apply asks it, too",
)
swap_tensor_impl = _name(
    "torch._C._swap_tensor_impl",
    "smp, to move parameters to a device that is no part of torch and to end a delay,",
    "torch.utils.swap_tensors uses it, too, and refuses tensors with weak references",
)
assert_async = _name(
    "torch._assert_async",
    "smp.nn.DistributedTransformerLMHead, to check ids,",
    "it fails on the device, without waiting for it",
)
unscale_gradients = _name(
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "smp, for training in half precision,",
    "torch.amp.GradScaler calls it; it divides tensors, and looks for infinite numbers",
)
if not TYPE_CHECKING:
    TorchDispatchMode = _name(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "smp, for the memory estimate and automatic partition,",
        "a mode whose __torch_dispatch__ sees each operation",
    )
    FakeTensor = _name(
        "torch._subclasses.fake_tensor.FakeTensor",
        "smp, for automatic partition and delayed initialization,",
        "tensors with a device and no memory, made by FakeTensor(mode, tensor on meta, device)",
    )
    FakeTensorMode = _name(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "smp, for automatic partition and delayed initialization,",
        "recorder.py derives from it, and overrides `dispatch`",
    )
    FakeCopyMode = _name(
        "torch._subclasses.fake_tensor.FakeCopyMode",
        "smp, for automatic partition,",
        "a mode in which copy.deepcopy makes fake tensors",
    )
    StorageWeakRef = _name(
        "torch.multiprocessing.reductions.StorageWeakRef",
        "smp, for the memory estimate and activation offloading,",
        "a weak reference to a storage, whose `cdata` `storage_expired` takes",
    )
FAKE_TENSORS: Any = () if is_absent(FakeTensor) else FakeTensor
"""For isinstance. Without the class, smddp makes no fake tensors."""
unset_fake_temporarily = _name(
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    _DELAY,
    "a context without fake mode",
)
operation_schema = _reader(
    "torch._ops.OpOverload._schema",
    _DELAY,
    "it says which arguments of an operation are written to",
    lambda: torch.ops.aten.add.Tensor,
)
operation_packet = _reader(
    "torch._ops.OpOverload._overloadpacket",
    "smp, for automatic partition,",
    "the key of torch.utils.flop_counter.flop_registry",
    lambda: torch.ops.aten.add.Tensor,
)
local_scalar_dense: Any = _name(
    "torch.ops.aten._local_scalar_dense.default", _DELAY, "the operation behind Tensor.item()"
)
storage_address = _reader(
    "torch.UntypedStorage._cdata",
    "smp, to see which tensors share memory,",
    "the address of the storage itself, not of its memory: those on meta have one, too",
)
storage_expired = _name(
    "torch.UntypedStorage._expired",
    "smp, for the memory estimate,",
    "it says whether a StorageWeakRef leads to nothing; StorageWeakRef.expired() does the same",
)


PARAMETER_MARK = "_is_param"
"""The attribute of a tensor of another class that makes it a parameter for isinstance."""


def mark_as_parameter(fake: Any) -> None:
    """Makes isinstance(…, nn.Parameter) true for a fake tensor."""
    setattr(fake, PARAMETER_MARK, True)
    if not isinstance(fake, torch.nn.Parameter):
        raise TorchInternalError(_sentence("Tensor._is_param", "smp, for automatic partition,"))


def forget_fakes(mode: Any) -> None:
    """Makes a fake mode forget the tensors that it has seen.

    It has weak references to its results, with which modules could not be converted, and real
    tensors with values, which it would change.
    """
    converter = mode.fake_tensor_converter
    converter.meta_converter.tensor_memo.clear()
    converter.constant_storage_mapping.clear()


@contextlib.contextmanager
def without_hooks(tensor: torch.Tensor) -> Iterator[None]:
    """In this context a tensor has no hooks; afterwards it has those of before, called or not."""
    hooks, later = backward_hooks_of_tensor(tensor), post_accumulate_grad_hooks(tensor)
    tensor._backward_hooks = tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    yield
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks, later


# --- autograd -------------------------------------------------------------------------------------

execution_engine = _name(
    "torch.autograd.Variable._execution_engine",
    "smp, for backward passes,",
    "run_backward(roots, gradients, keep_graph, create_graph, inputs, allow_unreachable, "
    "accumulate_grad) and queue_callback(function)",
)
_function_apply = _name(
    "torch._C._FunctionBase.apply",
    _CALLS,
    "`apply` of autograd's functions in C, without the look for transforms of torch.func that "
    "torch.autograd.Function.apply takes",
)
graph_task = _name(
    "torch._C._current_graph_task_id",
    "smp, for loss.backward() outside steps,",
    "-1 if no backward pass runs on this thread",
)
will_execute_node = _name(
    "torch._C._will_engine_execute_node",
    _CALLS,
    "torch.autograd.graph.register_multi_grad_hook uses it",
)
graph_is_kept = _name(
    "torch._C._autograd._get_current_graph_task_keep_graph",
    _CALLS,
    "torch's AOT autograd asks for it",
)
saved_tensors_hooks_now = _name(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "smp, for activation checkpointing,",
    "the innermost torch.autograd.graph.saved_tensors_hooks, or None",
)
current_node = _name(
    "torch._C._current_autograd_node",
    "smp, for the memory estimate,",
    "the node that a backward pass runs on this thread, or None; torch.autograd.graph takes it",
)
next_sequence_number = _name(
    "torch._C._autograd._get_sequence_nr",
    "smp, for the memory estimate,",
    "the number of the next node of this thread; torch.fx.proxy reads it",
)
sequence_number = _reader(
    "torch._C._functions.AccumulateGrad._sequence_nr",
    "smp, for the memory estimate,",
    "a method of nodes: nodes made later have larger numbers",
)
set_sequence_number = _reader(
    "torch._C._functions.AccumulateGrad._set_sequence_nr",
    "smp, to free the memory of a failed backward pass,",
    "a method of nodes; see common/engine.py",
)
interpreter_stack = _name(
    "torch._C._functorch.peek_interpreter_stack",
    _CALLS,
    "None outside transforms of torch.func",
)
is_batched = _name(
    "torch._C._functorch.is_legacy_batchedtensor",
    _CALLS,
    "true for gradients of is_grads_batched=True",
)
forward_level = _reader(
    "torch.autograd.forward_ad._current_level",
    _CALLS,
    "of the module forward_ad: -1 outside torch.autograd.forward_ad.dual_level",
)


def apply_of(kind: Any) -> Any:
    """Returns `apply` of a class derived from torch.autograd.Function, without checks."""
    if is_absent(_function_apply):
        return _function_apply
    return inspect.getattr_static(_look("torch._C._FunctionBase"), "apply").__get__(None, kind)


# --- modules --------------------------------------------------------------------------------------

_HOOKS = "smp, for hooks of modules,"
_HOOKED = "a dict in each torch.nn.Module, by the id of the handle; Module._call_impl reads it"


def _of_modules(attribute: str, feature: str, remedy: str) -> Any:
    return _reader(f"torch.nn.Module.{attribute}", feature, remedy, torch.nn.Module)


forward_hooks = _of_modules("_forward_hooks", _HOOKS, _HOOKED)
forward_pre_hooks = _of_modules("_forward_pre_hooks", _HOOKS, _HOOKED)
forward_hooks_with_kwargs = _of_modules("_forward_hooks_with_kwargs", _HOOKS, _HOOKED)
forward_pre_hooks_with_kwargs = _of_modules("_forward_pre_hooks_with_kwargs", _HOOKS, _HOOKED)
backward_hooks = _of_modules("_backward_hooks", _HOOKS, _HOOKED)
backward_pre_hooks = _of_modules("_backward_pre_hooks", _HOOKS, _HOOKED)
global_forward_hooks = _name(
    "torch.nn.modules.module._global_forward_hooks", _HOOKS, "those of all modules"
)
global_forward_pre_hooks = _name(
    "torch.nn.modules.module._global_forward_pre_hooks", _HOOKS, "those of all modules"
)
state_dict_hooks = _of_modules(
    "_state_dict_hooks",
    "smp, to divide a model whose entries hooks rename,",
    "true if a module has hooks that change its state dict",
)
non_persistent_buffers = _of_modules(
    "_non_persistent_buffers_set",
    "smp, for buffers of other ranks,",
    "the names of a module's buffers that are not in its state dict",
)
class_version = _of_modules(
    "_version", "smp.save_checkpoint", "the version of a class of modules, for state dicts"
)
IncompatibleKeys = _name(
    "torch.nn.modules.module._IncompatibleKeys",
    "model.load_state_dict of smp",
    "what Module.load_state_dict returns",
)
BatchNorm: Any = _name(
    "torch.nn.modules.batchnorm._BatchNorm",
    "smp, for training in half precision,",
    "the base class of all batch norms",
)
NormBase: Any = _name(
    "torch.nn.modules.batchnorm._NormBase",
    "smp, for activation checkpointing,",
    "the base class of all modules with running statistics",
)
_noted(
    "torch.nn.Module._compiled_call_impl",
    "smp, for automatic partition of compiled modules,",
    "what Module.compile() stores in a module, and Module.__call__ calls",
)
# Read as attributes everywhere: `nn.Module` itself has no other way to a module's own tensors that
# does not ask for buffers of other ranks, and subclasses of it read them in all libraries.
for _attribute in ("_parameters", "_buffers", "_modules"):
    _of_modules(
        _attribute,
        "smp.DistributedModel",
        "the dicts of a module's own parameters, buffers and modules. Change it in all files",
    )


_name(
    "torch.nn.Module._apply",
    "smp.DistributedModel",
    "`to`, `half` and others call it, and DistributedModel overrides it",
)


def check_modules() -> None:
    """Raises TorchInternalError if modules are not made as smp.DistributedModel expects."""
    for attribute in ("_parameters", "_buffers", "_modules", "_apply"):
        value = NAMES[f"torch.nn.Module.{attribute}"].value
        if is_absent(value):
            raise TorchInternalError(value.sentence)


def forget_compiled(module: torch.nn.Module) -> None:
    """Makes a copy of a compiled module run its code."""
    module.__dict__.pop("_compiled_call_impl", None)


def versions_in_state_dict(entries: Any) -> Any:
    """Returns the versions of classes that a state dict of torch has; None if it has none."""
    return getattr(entries, "_metadata", None)


def set_versions_in_state_dict(entries: Any, versions: Any) -> None:
    """Gives a state dict the versions of classes."""
    entries._metadata = versions


_reader(
    "torch.nn.Module.state_dict()._metadata",
    "smp.save_checkpoint",
    "the versions of the classes of modules, as an attribute of a state dict",
    lambda: torch.nn.Module().state_dict(),
)

# --- optimizers -----------------------------------------------------------------------------------


def _of_scaler(attribute: str, remedy: str) -> Any:
    return _reader(
        f"torch.amp.GradScaler.{attribute}",
        "smp.amp.GradScaler",
        remedy,
        lambda: torch.amp.GradScaler("cpu"),
    )


scale_of_scaler = _of_scaler("_scale", "None until the first loss is scaled")
device_of_scaler = _of_scaler("_device", "the type of its device")
states_of_scaler = _of_scaler(
    "_per_optimizer_states",
    "by id of an optimizer: a dict whose `found_inf_per_device` has tensors by device",
)
begin_scaling = _of_scaler("_lazy_init_scale_growth_tracker", "makes `_scale`")
_SCALING = "_step_supports_amp_scaling"
_noted(
    f"torch.optim.SGD.{_SCALING}",
    "smp.amp.GradScaler, with fused optimizers,",
    "torch.amp.GradScaler.step reads it: does the optimizer look for infinite gradients itself?",
    lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, fused=True),
)


def unscale_outside(optimizer: Any) -> None:
    """Makes GradScaler treat an optimizer that looks for infinite gradients like any other."""
    if getattr(optimizer, _SCALING, False):
        setattr(optimizer, _SCALING, False)
    elif not hasattr(optimizer, _SCALING) and getattr(optimizer, "defaults", {}).get("fused"):
        path = f"torch.optim.SGD.{_SCALING}"
        raise TorchInternalError(_sentence(path, NAMES[path].feature))


# --- torch.distributed ----------------------------------------------------------------------------

backend_of_group = _reader(
    "torch.distributed.ProcessGroup._get_backend",
    "smddp.describe, smddp.statistics and smp, for the backend of a group,",
    "a method: the backend of a group for a torch.device. Groups in Python have one of their own",
)
device_types = _reader(
    "torch.distributed.ProcessGroup._device_types",
    "smp, for process groups,",
    "the devices for which a group has backends",
)
timeout_of_options = _reader(
    "torch._C._distributed_c10d.Backend.Options._timeout",
    "smp, for process groups of scripts,",
    "the timeout of a backend; ProcessGroupNCCL.Options has it, too",
)
BackendOptions: Any = _name(
    "torch._C._distributed_c10d.Backend.Options",
    "smddp, for the option pg_options,",
    "the base class of the options of torch's own backends",
)
default_group = _name(
    "torch.distributed.distributed_c10d._get_default_group",
    "smddp.describe and smddp.statistics, for the default group,",
    "the default group; ValueError if there is none",
)
default_store = _name(
    "torch.distributed.distributed_c10d._get_default_store",
    "smp.init, after init_process_group,",
    "the store of the default group",
)
store_of_group = _name(
    "torch.distributed.distributed_c10d._get_process_group_store",
    "smp, to see whether all ranks make a call,",
    "the store of a group",
)
broadcast_coalesced = _name(
    "torch.distributed._broadcast_coalesced",
    "smp, for replicas,",
    "broadcasts many tensors in few messages: (group, tensors, bytes, source). DDP calls it",
)
world = _reader(
    "torch.distributed.distributed_c10d._world",
    "SMDDP_INSTEAD_OF",
    "of the module distributed_c10d. By group: pg_map has (backend, store), and pg_backend_config "
    "the text of a BackendConfig",
)
name_of_ranks = _name(
    "torch.distributed.distributed_c10d._hash_ranks_to_str",
    "smp.init, to let ranks make their own groups only,",
    "the name of a group that its ranks make alone. Without it each rank makes all groups",
)
_MEMBERS = "smddp.elastic, for models in DDP,"
update_group_of_ddp = _reader(
    "torch.nn.parallel.DistributedDataParallel._update_process_group",
    _MEMBERS,
    "a method: DDP goes on with a group whose members have changed, also after a backward pass "
    "that has failed",
)
push_parameters_of_reducer = _reader(
    "torch._C._distributed_c10d.Reducer._push_all_rebuilt_params",
    _MEMBERS,
    "a method: the next buckets have the parameters in their order. The others of DDP's reducer "
    "here are called with it, by Kept.change_members",
)
rebuild_buckets_of_reducer = _reader(
    "torch._C._distributed_c10d.Reducer._rebuild_buckets",
    _MEMBERS,
    "a method: makes these buckets, on all ranks",
)
reset_reducer = _reader(
    "torch._C._distributed_c10d.Reducer._reset_state",
    _MEMBERS,
    "a method: the buckets are made again after the next step",
)
call_when_cuda_starts = _name(
    "torch.cuda._lazy_call",
    "smddp, to choose the GPU of a rank,",
    "calls a function when CUDA is first used; torch.cuda.manual_seed calls it",
)
_noted(
    "torch.distributed.Backend._plugins",
    "smddp, to register its backend once only,",
    "the backends that are registered; _registration.py does without it",
)


def set_timeout(options: Any, timeout: Any) -> None:
    """Sets the timeout of the options of NCCL."""
    options._timeout = timeout


def register_fake_backend() -> None:
    """Registers torch's backend "fake", which does nothing, for benchmarks."""
    name = "torch.testing._internal.distributed.fake_pg"
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise TorchInternalError(_sentence(name, NAMES[name].feature)) from error


_noted(
    "torch.testing._internal.distributed.fake_pg",
    'smddp bench, for the backend "fake",',
    "its import registers the backend",
)

# --- functions of torch that smddp replaces -------------------------------------------------------


class _Place(NamedTuple):
    """Where a function is: an attribute of a class, a module or a cell of a closure."""

    holder: Any
    attribute: str

    def held(self) -> Any:
        if isinstance(self.holder, type):  # as it is, without binding
            return inspect.getattr_static(self.holder, self.attribute)
        return getattr(self.holder, self.attribute)


def _place(path: str) -> _Place:
    _look(path)
    holder, _, attribute = path.rpartition(".")
    return _Place(_look(holder), attribute)


def _cell(path: str) -> _Place:
    """Returns the cell in which a function that torch wraps has the wrapped one.

    Scripts that have imported the wrapper by name call what is in the cell.
    """
    wrapper, wrapped = _look(path.rpartition(".")[0]), _look(path)
    for cell in wrapper.__closure__ or ():
        if cell.cell_contents is wrapped:
            return _Place(cell, "cell_contents")
    raise AttributeError(path)


class Patch:
    """A function of torch that smddp replaces by its own, and puts back.

    Attributes:
        places: paths of the function; more than one if several modules have it.
        owner: "smp" or "smddp"; see `undo`.
        feature: what needs it.
        remedy: what to do when a release of torch does not have it; for developers.
        lasts: stays until `undo`; otherwise for a context of the script.
        instead: if torch does not have the function any more: the public function that raises
            TorchInternalError then. Without one, `install` raises.
        original: what torch has, as it is in the class or module: possibly a `staticmethod`. The
            missing name if it has nothing.
    """

    def __init__(
        self,
        *places: str,
        owner: str,
        feature: str,
        remedy: str,
        lasts: bool = True,
        instead: str = "",
        find: Callable[[str], _Place] = _place,
    ) -> None:
        self.places, self.owner, self.feature, self.remedy = places, owner, feature, remedy
        self.lasts, self.instead = lasts, instead
        self._find = find
        self._own: Any = None
        # Where the original has been replaced; whether the class had it itself, or inherits it.
        self._replaced: list[tuple[_Place, bool]] = []
        try:
            self.original = find(places[0]).held()
        except _MISSING:
            self.original = _absent(places[0], feature)
        PATCHES.append(self)

    def found(self) -> list[_Place]:
        """Returns the places where torch has the function now.

        Raises:
            TorchInternalError: it does not have it.
        """
        try:
            first = self._find(self.places[0])
        except _MISSING as error:
            raise TorchInternalError(_sentence(self.places[0], self.feature)) from error
        places = [first]
        for path in self.places[1:]:
            with contextlib.suppress(*_MISSING):
                place = self._find(path)
                if place.held() is first.held():
                    places.append(place)
        return places

    def install(self, make: Callable[[Any], Any]) -> None:
        """Replaces the function, unless that is done.

        Args:
            make: returns what replaces the original, which it gets.

        Raises:
            TorchInternalError: torch does not have the function any more.
        """
        if self._own is not None:
            for place, _ in self._replaced:
                if place.held() is self.original:  # somebody has put it back
                    setattr(*place, self._own)
            return
        try:
            places = self.found()
        except TorchInternalError as error:
            if not self.instead:
                raise
            self._refuse(error)
            return
        self.original = places[0].held()
        self._own = make(self.original)
        for place in places:
            own = not isinstance(place.holder, type) or place.attribute in vars(place.holder)
            setattr(*place, self._own)
            self._replaced.append((place, own))

    def _refuse(self, error: TorchInternalError) -> None:
        place, text = _place(self.instead), str(error)
        warnings.warn(text, stacklevel=4)

        def refuse(*_: Any, **__: Any) -> Any:
            raise TorchInternalError(text)

        self.original, self._own = place.held(), refuse
        setattr(*place, refuse)
        self._replaced.append((place, True))

    def undo(self) -> None:
        """Puts the original back, except where another library has replaced smddp's function."""
        for place, own in self._replaced.copy():
            if place.held() is not self._own:
                continue
            if own:
                setattr(*place, self.original)
            else:
                delattr(*place)
            self._replaced.remove((place, own))
        if not self._replaced:
            self._own = None

    @contextlib.contextmanager
    def installed(self, make: Callable[[Any], Any]) -> Iterator[None]:
        """Returns a context in which the function is replaced."""
        self.install(make)
        try:
            yield
        finally:
            self.undo()


PATCHES: list[Patch] = []
_changes: dict[str, dict[Any, Callable[[], object]]] = {}


def until_undone(owner: str, key: Any, make: Callable[[], Callable[[], object]]) -> None:
    """Makes another change than a replacement, such as a hook, unless it is made.

    Args:
        owner: as of a Patch.
        key: of the change.
        make: makes the change, and returns what takes it back.
    """
    changes = _changes.setdefault(owner, {})
    if key not in changes:
        changes[key] = make()


def undo(owner: str) -> None:
    """Puts back all that an owner has replaced in torch."""
    for patch in reversed(PATCHES):
        if patch.owner == owner:
            patch.undo()
    for take_back in _changes.pop(owner, {}).values():
        take_back()


MODULE_CALLS = Patch(
    "torch.nn.Module._call_impl",
    owner="smp",
    feature="smp.DistributedModel",
    remedy="what Module.__call__ calls, with hooks: a call of a module goes to the rank that has "
    "it. A module that is compiled has it inside",
)
FUNCTION_APPLY = Patch(
    "torch.autograd.Function.apply",
    owner="smp",
    feature="smp.DistributedModel",
    remedy="it takes tensors without __torch_function__: those of other ranks have to be fetched. "
    "Some releases define it in Python, others in C",
)
BACKWARD_PASSES = Patch(
    "torch.autograd._engine_run_backward",
    owner="smp",
    feature="smp.DistributedModel",
    remedy="what backward() and grad() both call: a pass of a step asks all ranks for parameters",
)
BACKWARD = Patch(
    "torch.autograd.backward",
    owner="smp",
    feature="smp.DistributedModel",
    remedy="backward(inputs=…) of remote parameters has to raise",
)
FUNCTIONAL_CALL = Patch(
    "torch.nn.utils.stateless._functional_call",
    owner="smp",
    feature="torch.func.functional_call, while there is an smp.DistributedModel,",
    remedy="torch.func.functional_call calls it, which scripts have imported by name; it has to "
    "raise for remote parameters",
    instead="torch.func.functional_call",
)
AVERAGED_MODEL = Patch(
    "torch.optim.swa_utils.AveragedModel.update_parameters",
    owner="smp",
    feature="torch.optim.swa_utils.AveragedModel, of an smp.DistributedModel,",
    remedy="each rank averages what lives there",
    instead="torch.optim.swa_utils.AveragedModel.__init__",
)
SAVED_TENSORS_HOOKS = Patch(
    "torch.autograd.graph.saved_tensors_hooks.__enter__",
    owner="smp",
    feature="smp, for sharded data parallelism,",
    remedy="hooks of other code have to see sharded parameters as plain tensors",
)


def _of_clipping(function: str) -> Patch:
    return Patch(
        f"torch.nn.utils.{function}.__wrapped__",
        owner="smp",
        feature=f"torch.nn.utils.{function}, while there is an smp.DistributedModel,",
        remedy="torch wraps it by a function without gradients, in whose cell it is: ranks have to "
        "take the norm over all of them. If it is not wrapped any more, replace its code",
        instead=f"torch.nn.utils.{function}",
        find=_cell,
    )


CLIP_NORM = _of_clipping("clip_grad_norm_")
CLIP_VALUE = _of_clipping("clip_grad_value_")
TOTAL_NORM = _of_clipping("get_total_norm")
CLIP_WITH_NORM = _of_clipping("clip_grads_with_norm_")

NEW_MODULES = Patch(
    "torch.nn.Module.__init__",
    owner="smp",
    feature="smp.partition, smp.tensor_parallelism and smp.model_creation",
    remedy="a context sees each new module",
    lasts=False,
)
NEW_PARAMETERS = Patch(
    "torch.nn.Parameter.__new__",
    owner="smp",
    feature=_DELAY,
    remedy="parameters of other classes are made at once",
    lasts=False,
)
NEW_SUBCLASSES = Patch(
    "torch.Tensor._make_subclass",
    owner="smp",
    feature=_DELAY,
    remedy="tensors of other classes are made at once",
    lasts=False,
)
LOADS = Patch(
    "torch.load",
    owner="smp",
    feature=_DELAY,
    remedy="in a fake mode it would return tensors without values",
    lasts=False,
)

_CALLBACKS = "smddp, for collectives in callbacks of futures,"
_CALLBACKS_REMEDY = (
    "smddp has to know of each callback, to order its collectives; see _callbacks.py"
)
GET_FUTURE = Patch(
    "torch._C._distributed_c10d.Work.get_future",
    owner="smddp",
    feature=_CALLBACKS,
    remedy=_CALLBACKS_REMEDY,
)
FUTURE_THEN = Patch(
    "torch._C.Future.then", owner="smddp", feature=_CALLBACKS, remedy=_CALLBACKS_REMEDY
)
FUTURE_ADD = Patch(
    "torch._C.Future.add_done_callback",
    owner="smddp",
    feature=_CALLBACKS,
    remedy=_CALLBACKS_REMEDY,
)
COLLECT_ALL = Patch(
    "torch._C._collect_all",
    owner="smddp",
    feature="torch.futures.collect_all, with groups of smddp,",
    remedy=f"torch.futures.collect_all calls it. {_CALLBACKS_REMEDY}",
    instead="torch.futures.collect_all",
)
SPLIT_GROUP = Patch(
    "torch.distributed.split_group",
    "torch.distributed.distributed_c10d.split_group",
    owner="smddp",
    feature="smddp, for torch.distributed.split_group,",
    remedy="a backend sees only one of the lists, and all have to be right; see _split.py",
)
INIT_PROCESS_GROUP = Patch(
    "torch.distributed.init_process_group",
    "torch.distributed.distributed_c10d.init_process_group",
    "torch.distributed.device_mesh.init_process_group",
    owner="smddp",
    feature="smddp, for ranks of mpirun and srun, and SMDDP_INSTEAD_OF,",
    remedy="it reads torch's variables before a backend is asked; see _registration.py",
)
NEW_GROUP = Patch(
    "torch.distributed.distributed_c10d._new_process_group_helper",
    owner="smddp",
    feature="SMDDP_INSTEAD_OF",
    remedy="torch makes each group by it. Its arguments `backend` and `backend_options` are "
    "replaced, and it returns (group, store)",
)
