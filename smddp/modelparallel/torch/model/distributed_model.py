"""`smp.DistributedModel`: a model whose parts live on different ranks."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.hooks import RemovableHandle

from smddp._torch_internals import check_modules, until_undone
from smddp.modelparallel.core.errors import SMPInitializationError, SMPUsageError
from smddp.modelparallel.torch.common.example import Example
from smddp.modelparallel.torch.common.placeholder import force
from smddp.modelparallel.torch.common.structure import map_tensors
from smddp.modelparallel.torch.data_parallel.holders import Ranks
from smddp.modelparallel.torch.data_parallel.reducer import DataParallel
from smddp.modelparallel.torch.delayed.life import is_delayed
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.model.queries import ModelQueries
from smddp.modelparallel.torch.model.runtime import ModelRuntime
from smddp.modelparallel.torch.model.same_batch import seed_of_batch
from smddp.modelparallel.torch.optimizer.clipping import clip_grad_norm, patch_clipping
from smddp.modelparallel.torch.optimizer.half import to_float, to_half
from smddp.modelparallel.torch.pipeline.microbatch import divided_arguments
from smddp.modelparallel.torch.pipeline.randomness import draw_seed, seeded
from smddp.modelparallel.torch.pipeline.remote_tensor import RemoteTensor, retype
from smddp.modelparallel.torch.tensor.division import division_of
from smddp.modelparallel.torch.tensor.replace import alike_on_all, replace_marked

__all__ = ["DistributedModel"]


class Wrapped(nn.Module):
    """A level between `DistributedModel` and the model, which is its attribute `module`.

    In the original library another wrapper was there, and scripts that do not know `get_module`
    reach the model by `model.module.module`. Attributes that this class lacks are the model's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet
                raise
            return getattr(self.module, name)


class DistributedModel(ModelQueries):
    """Wraps a model for training in a pipeline; its parameters stay the same objects.

    With one partition it is ready at once. With several, its first call in a step decides where
    each module lives; parameters that live on another rank then become empty (device "meta").
    Modules that `smp.tensor_parallelism` has marked are replaced first, so create the optimizer
    after this. The run of the model before that decision leaves nothing behind: attributes, lists,
    global variables that forward methods and hooks name, generators of random numbers and context
    variables are as before.

    What follows is about modules of other ranks, in a step.

    **Arguments and results** are pickled, except tensors; gradients go through the tensors in them.
    A tensor keeps its strides, unless it has gaps or repeated elements, as after `x[:, ::2]` or
    `expand`: then it arrives as `clone()` would make it. Sparse tensors travel. Nested and
    quantized tensors, and tensors of classes without memory of their own, are refused: pass their
    parts, and make the tensor in the module that needs it. A module may change its arguments:
    lists, dicts, dataclasses, any object of Python, and tensors in place; the caller's own get the
    changes. Refused are objects with state outside Python (a numpy array, a torch.Generator),
    objects that are passed twice, and those whose pickled copy has other parts. The caller waits
    for the result then, so a module that begins with `ReLU(inplace=True)` is slower there. Code
    that calls the module does not see its exception: catch it in the module's own forward method.

    **Attributes.** What a call sets as attributes of its module, or of modules inside it, its
    caller finds there afterwards, with gradients, if it is a number, a text, a tensor, or a list,
    tuple, dict or set of these; a warning names others. Steps 1, 2, 4, 8 and so on of a function
    are watched to find which modules do so. Other ranks than the caller do not see the attributes.
    If code changes attributes of modules of its own rank, or other objects, in several microbatches
    before it waits for another rank, microbatches run one after the other. A module does not see
    attributes, or modules put in the place of others, that code of another rank sets during a step,
    nor global variables, context variables or `torch.set_default_dtype`; in a watched step a
    warning names what was changed, and the module. Other methods than forward run where they are
    called. So layers whose own backward methods are called in place of autograd, as Reformer's are,
    have to be with their caller: use `smp.set_partition`.

    **Hooks.** Forward hooks run where the module lives, and once more on each rank whose code has
    called it or a module around it, after the call, in the order of the calls. One that is
    registered in a step runs only where code has registered it, and must not return a value. One
    from before may return a value in place of the result: it then belongs to the module's owner,
    and so does a hook that calls a module or changes a buffer of another rank. Hooks for backward
    passes, and before the forward method, run where the module lives.

    **Parameters and buffers** can be read, and not changed; an error names the tensor. It is an
    error to use a buffer of another rank if a gradient goes through it, if it is sparse, or after a
    later call has put another tensor in its place; or a view of it, after a later call has changed
    it. A buffer that a forward method registers raises AttributeError on other ranks in that step:
    register it as None in the constructor. Code that reads a buffer of another module on its own
    rank may see what another microbatch has done to it; `active_microbatches: 1` avoids that.
    Buffers that share memory live on one rank. The body may call only parts of the model in its
    forward method. Outside the step, code that changes parameters or buffers runs on all ranks, and
    each changes what lives on it.

    The arguments are those of the SageMaker Python SDK's documentation of the class.

    Args:
        module: the model. No module in it may be of torch.jit, or a DistributedDataParallel; its
            parameters and buffers must have values, or have been made inside
            `smp.delay_param_initialization`; so modules `nn.Lazy...` have to be called before.
        trace_device: "gpu" or "cpu"; the model is traced on fake tensors in both cases.
        trace_execution_times: measure modules on real data instead of counting operations.
        trace_memory_usage: accepted; activations are always counted.
        overlapping_allreduce: reduce gradients over replicas while the pipeline still works.
        backward_passes_per_step: the number of steps whose gradients are added before they are
            reduced.
        average_grads_across_microbatches: divide gradients by the number of microbatches.
        bucket_cap_mb: size in MiB of the buckets in which gradients are reduced.
        broadcast_buffers: make buffers equal on all replicas at the beginning of every step with
            gradients: they get the values of the first replica that has a batch.
        gradient_as_bucket_view: let gradients be views of the buckets.
        find_unused_parameters: accepted; unused parameters are always found.

    Raises:
        SMPInitializationError: `smp.init` has not been called.
        SMPUsageError: the module or an argument is not allowed, or there is such a model already.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        trace_memory_usage: bool = False,
        overlapping_allreduce: bool | None = None,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        check_modules()

        def made() -> nn.Module:
            _check(module, trace_device, trace_execution_times, backward_passes_per_step)
            return replace_marked(module)

        root = alike_on_all(made)
        cfg, topology = state.cfg, state.topology
        self.module = Wrapped(root)
        _name_original_forwards(root)
        if overlapping_allreduce is None:
            overlapping_allreduce = cfg.overlapping_allreduce
        data_parallel = DataParallel(
            state.groups.of_steps("dp"),
            topology.size_of("dp"),
            bucket_cap_mb,
            backward_passes_per_step,
            overlapping_allreduce,
            broadcast_buffers,
            gradient_as_bucket_view,
        )
        if topology.tp_size > 1:
            data_parallel.holders.divided = Ranks(state.groups.of_steps("rdp"), topology.rdp_size)
            data_parallel.holders.is_divided = lambda parameter: division_of(parameter) is not None
        patch_clipping()
        # Not by nn.Module.__setattr__, because it does not belong to the model.
        self.__dict__["runtime"] = ModelRuntime(
            state,
            self,
            root,
            data_parallel,
            average_grads_across_microbatches,
            trace_execution_times,
        )
        state.model = weakref.ref(self)

    # --- what scripts call ------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model.

        With fp16 or bf16 in the configuration, fp32 tensors among the arguments are converted to
        that dtype, and half-precision results to fp32.

        Returns:
            What the model returns. Its tensors are never lazy.

        Raises:
            SMPUsageError: there are several partitions, and the call is not inside a step; or the
                ranks of a tensor-parallel group have batches of different forms, or with
                `prescaled_batch` different ones.
        """
        runtime = self.runtime
        task = runtime.executor.baton.current.task
        if task is None and runtime.executor.size > 1:
            raise SMPUsageError(
                "with more than one partition, the model can be called only inside a function "
                "decorated with smp.step"
            )
        if task is None:
            runtime.gradients.note_trained()
            runtime.data_parallel.begin_outside()
        half = runtime.half
        if half is not None:
            args = tuple([to_half(value, half) for value in args])
            kwargs = {name: to_half(value, half) for name, value in kwargs.items()}
        if runtime.example is None and torch.is_grad_enabled():
            runtime.example = Example.of(args, kwargs)
        if not runtime.executor.ending.state.divided:
            runtime.division.divide(args, kwargs)
        if task is not None:
            result = map_tensors(force, self.get_module()(*args, **kwargs))
        else:
            with self._compared(args, kwargs):
                result = map_tensors(force, self.get_module()(*args, **kwargs))
            result = map_tensors(runtime.gradients.outside_step, result)
        return result if half is None else to_float(result)

    @contextlib.contextmanager
    def _compared(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Outside a step, compares the batches of the ranks of the tp group; see `same_batch`."""
        with contextlib.ExitStack() as stack:
            if state.topology.tp_size > 1:
                forward = self.get_module().forward
                batch = functools.partial(divided_arguments, forward, args, kwargs, ())
                seed = seed_of_batch(draw_seed(), batch)
                if state.cfg.prescaled_batch:
                    stack.enter_context(seeded(seed))
            stack.enter_context(self.runtime.model.routing.outside_a_step())
            yield

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Does what `torch.autograd.backward` does, through the pipeline.

        With fp16 or bf16 in the configuration it multiplies the tensors by the optimizer's loss
        scale.

        Args:
            tensors: usually the loss, a tensor of one element.
            grad_tensors: their gradients; as for `torch.autograd.backward`.

        Raises:
            SMPUsageError: there are several partitions, and the call is not inside a step; or it is
                the second backward pass through a call of a module on another rank.
        """
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else grad_tensors
        task = self.runtime.executor.baton.current.task
        if task is None:
            if self.runtime.executor.size > 1:
                raise SMPUsageError(
                    "with more than one partition, model.backward can be called only inside a "
                    "function decorated with smp.step"
                )
            torch.autograd.backward(self._scaled(roots), given)
            if self.runtime.main_parameters is not None:
                self.runtime.main_parameters.note_new_gradients()
            return
        frame = task.frame
        roots = self._scaled([force(root) for root in roots])
        self.runtime.executor.reach_backward(frame)
        executor = self.runtime.executor
        frame.forward = False
        executor.timeline.leave()
        executor.enter(frame, False)
        try:
            torch.autograd.backward(roots, given)
        finally:
            frame.forward = True
            executor.timeline.leave()
            executor.enter(frame, True)

    def _scaled(self, roots: list[torch.Tensor]) -> list[torch.Tensor]:
        main_parameters = self.runtime.main_parameters
        scale = 1.0 if main_parameters is None else main_parameters.scaler.loss_scale
        return roots if scale == 1 else [root.float() * scale for root in roots]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Does what `smp.clip_grad_norm` does.

        Trainers call a method of this name, as FSDP's models have it, in place of torch's function.
        """
        return clip_grad_norm(max_norm, norm_type)

    def state_dict(
        self,
        gather_to_rank0: bool = False,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> Any:
        """Returns all parameters and buffers by name, gathered from all ranks.

        The names are the original ones, except for modules that smp has replaced. The table "Who
        has to call it" of docs/model-parallel-reference.md says which ranks have to call it.

        Args:
            gather_to_rank0: only rank 0 of the job gets them; the other ranks get an empty dict.
            destination: gets the entries, and is returned; None for a new dict. With it, a module
                that has this model as an attribute has its entries in its own state dict.
            prefix: begins their names.
            kwargs: others of nn.Module are accepted, and without effect.

        Raises:
            SMPPeerError: a rank has not called it within the timeout of the process group.
            SMPUsageError: the body of a step calls it, and other ranks have to, too.
        """
        state.refuse_alone_in_step("model.state_dict()")
        entries = self.runtime.model_state.full(gather_to_rank0)
        if destination is None and not prefix:
            return entries
        found = {} if destination is None else destination
        found.update({f"{prefix}{name}": value for name, value in entries.items()})
        return found

    def local_state_dict(self) -> dict[str, Any]:
        """Returns the parameters and buffers of this rank, with the key `_smp_is_partial`."""
        return self.runtime.model_state.local()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> Any:
        """Loads a full state dict, or the partial ones of all ranks.

        Args:
            state_dict: as `state_dict` or `local_state_dict` has returned it. One without the key
                `_smp_is_partial` may have the names of Hugging Face for modules that smp has
                replaced.
            strict: raise if names are missing or unexpected.
            same_partition_load: a partial one was saved with the same partition, so this rank needs
                nothing of other partitions. Without effect before the first step.

        Returns:
            The missing and the unexpected names, as nn.Module does.

        Raises:
            RuntimeError: with `strict`, the names do not fit the model; or shapes do not.
            ValueError: a shard of a parameter is missing.
            SMPUsageError: it has shards, and this job does not shard parameters.
            SMPPeerError: a partial one is loaded, and a rank of the pipeline, or of the sharding
                group, has not called this.
        """
        state.refuse_alone_in_step("model.load_state_dict()")
        result = self.runtime.model_state.load(state_dict, strict, same_partition_load)
        if self.runtime.main_parameters is not None:
            self.runtime.main_parameters.copy_from_parameters()
        return result

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers `hook(model, optimizer)`, called once when it is decided where modules live.

        If that is decided already, the hook is called at once.
        """
        hooks = self.runtime.hooks
        handle = hooks.register("partition", hook)
        if self.partitioned:
            hooks.run("partition")
        return handle

    def register_post_step_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers `hook(model, optimizer)`, called once at the end of the next step."""
        return self.runtime.hooks.register("step", hook)

    def register_comm_hook(self, state: Any, callable: Callable[..., Any]) -> None:
        """Lets `callable(state, bucket)` reduce gradients over replicas, as in DDP.

        It has to average over the replicas and over the microbatches. With one replica it is not
        called, and the step averages. It gets the gradients with what was in `Parameter.grad`
        before the step: the sums of the steps since the last reduction, with
        `backward_passes_per_step`. So clear gradients after each reduction.

        Args:
            state: passed to the hook.
            callable: gets a `Bucket`; returns a future of the reduced gradients, a tensor of the
                shape and dtype of `bucket.buffer()`.

        Raises:
            SMPUsageError: `ddp` or `overlapping_allreduce` is off, or parameters are sharded or
                divided over tensor-parallel ranks.
        """
        self._refuse_with_sharding("register_comm_hook", "a hook gets whole gradients")
        if not _with_ddp() or not self.runtime.data_parallel.overlap:
            raise SMPUsageError(
                "register_comm_hook needs ddp in the configuration and overlapping_allreduce"
            )
        if _tp_size() > 1:
            raise SMPUsageError(
                "register_comm_hook does not work with tensor_parallel_degree greater than 1: "
                "gradients of divided parameters are averaged over other ranks than the rest"
            )
        self.runtime.data_parallel.buckets.hook = lambda bucket: callable(state, bucket)

    def join(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which replicas may have different numbers of batches.

        Raises:
            SMPUsageError: `ddp` is off in the configuration, `shard_optimizer_state` is on,
                parameters are sharded or divided, or replicas run their tasks in one order
                (`deterministic_server`).
        """
        self._refuse_with_sharding("join()", "every replica is needed to gather parameters")
        if not _with_ddp():
            raise SMPUsageError("join() needs ddp in the configuration")
        if state.cfg.shard_optimizer_state:
            raise SMPUsageError(
                "join() does not work with shard_optimizer_state: all replicas have to call "
                "optimizer.step() equally often"
            )
        if _tp_size() > 1:
            raise SMPUsageError(
                "join() does not work with tensor_parallel_degree greater than 1: all ranks of a "
                "tensor-parallel group are needed to exchange activations"
            )
        if self.runtime.executor.member is not None:
            raise SMPUsageError(
                "join() does not work with deterministic_server: replicas that run their tasks in "
                "one order need the same number of batches"
            )
        return self.runtime.data_parallel.join.context()

    def _refuse_with_sharding(self, what: str, why: str) -> None:
        if self.runtime.sharding is not None:
            raise SMPUsageError(
                f"{what} does not work with sharded_data_parallel_degree greater than 1: {why}"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients on this rank; see nn.Module.

        Raises:
            SMPUsageError: the body of a step calls it.
        """
        state.refuse_in_step(
            "model.zero_grad()", "gradients of earlier steps are added when the step ends"
        )
        super().zero_grad(set_to_none)
        if self.partitioned and self.runtime.sharding is not None:
            for shard in self.runtime.optimised():  # the module does not know the shards
                if shard.grad is not None:
                    shard.grad = None if set_to_none else torch.zeros_like(shard.grad)

    def cpu(self) -> DistributedModel:
        """Gathers all parameters and buffers on every rank of the pipeline, in host memory.

        All ranks of the pipeline have to call it. The next step makes what lives on other ranks
        empty again. Before it is decided where modules live, it does nothing. A parameter that is
        divided over tensor-parallel ranks stays this rank's part: `state_dict` unites the parts.

        Raises:
            SMPPeerError: a rank has not called it within the timeout of the process group.
            SMPUsageError: parameters are sharded.
        """
        self._refuse_with_sharding("model.cpu()", "use model.state_dict() for whole parameters")
        state.refuse_alone_in_step("model.cpu()")
        if self.partitioned:
            self.runtime.model_state.gather_in_place()
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        # DistributedDataParallel asks for it.
        raise SMPUsageError(_NO_DDP)

    def __deepcopy__(self, memo: Any) -> Any:
        raise SMPUsageError(
            "a smp.DistributedModel cannot be copied; copy model.get_module(), the model itself"
        )

    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        """Moves what lives on this rank, or converts its dtype; see nn.Module.

        It has no effect before it is decided where modules live; that decision moves them to the
        device of this rank.
        """
        return super().to(*args, **kwargs) if self.partitioned else self

    def cuda(self, device: Any = None) -> DistributedModel:
        """Moves what lives on this rank to a GPU; see `to`."""
        return super().cuda(device) if self.partitioned else self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Applies a function to what lives here; `to`, `float` and the like call this."""
        sharding = self.runtime.sharding
        alone = self.runtime.executor.size == 1 and sharding is None
        if not self.partitioned or alone:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for parameter in self.runtime.placement.parameters():
            entry = None if sharding is None else sharding.entry(parameter)
            if entry is not None:
                entry.apply(fn)
                continue
            parameter.data = fn(parameter.data)
            if sharding is not None:
                sharding.renew(parameter)
            if parameter.grad is not None:
                parameter.grad = fn(parameter.grad)
        self.runtime.division.buffers.apply(fn)
        for tensor in (*self.parameters(), *self.buffers()):
            if isinstance(tensor, RemoteTensor):
                retype(tensor, fn)
        return self


def _tp_size() -> int:
    return state.topology.tp_size


def _with_ddp() -> bool:
    with_ddp: bool = state.cfg.ddp
    return with_ddp


def _name_original_forwards(module: nn.Module) -> None:
    """Gives classes `_orig_forward`, which scripts for the original library call by super()."""
    for kind in {base for part in module.modules() for base in type(part).__mro__}:
        if "forward" in vars(kind) and kind is not nn.Module and "_orig_forward" not in vars(kind):
            until_undone("smp", (kind, "_orig_forward"), functools.partial(_name_forward, kind))


def _name_forward(kind: Any) -> Callable[[], None]:
    kind._orig_forward = forward = kind.forward

    def take_back() -> None:
        if vars(kind).get("_orig_forward") is forward:
            del kind._orig_forward

    return take_back


_NO_DDP = "smp.DistributedModel reduces gradients itself: do not use DistributedDataParallel"


def _check_parts(root: nn.Module) -> None:
    for name, part in root.named_modules():
        what = f"module {name!r}" if name else "the model"
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise SMPUsageError(f"{what} is a DistributedDataParallel. {_NO_DDP}")
        if isinstance(part, torch.jit.ScriptModule):
            raise SMPUsageError(f"{what} is of torch.jit, and cannot be divided")
        if isinstance(part, LazyModuleMixin) and part.has_uninitialized_params():  # type: ignore[misc]
            raise SMPUsageError(
                f"{what} is a {type(part).__name__}, whose parameters have no shape yet. Call the "
                "model on an example before smp.DistributedModel, on all ranks"
            )
    for kind, tensors in (
        ("parameter", root.named_parameters()),
        ("buffer", root.named_buffers()),
    ):
        for name, tensor in tensors:
            if tensor.is_meta:
                raise SMPUsageError(
                    f"{kind} {name!r} is on the device meta, and has no values. Before "
                    'smp.DistributedModel, call module.to_empty(device="cpu"), and initialise or '
                    "load its state"
                )


def _check(module: nn.Module, device: str, times: bool, passes: int) -> None:
    if not state.initialized:
        raise SMPInitializationError("call smp.init() before smp.DistributedModel")
    if not isinstance(module, nn.Module):
        raise SMPUsageError(
            f"smp.DistributedModel takes a torch.nn.Module, not {type(module).__name__}"
        )
    if isinstance(module, DistributedModel):
        raise SMPUsageError("the module is a smp.DistributedModel already")
    if state.current_model() is not None:
        raise SMPUsageError("there is a smp.DistributedModel already; a script can have one")
    _check_parts(module)
    if times and any(map(is_delayed, module.parameters())):
        raise SMPUsageError(
            "trace_execution_times needs parameters with values: leave it out, or create the model "
            "outside smp.delay_param_initialization"
        )
    if device not in ("cpu", "gpu"):
        raise SMPUsageError(f"trace_device must be 'cpu' or 'gpu', not {device!r}")
    if times and device == "cpu":
        raise SMPUsageError("trace_execution_times must be False if trace_device is 'cpu'")
    if passes < 1:
        raise SMPUsageError("backward_passes_per_step must be at least 1")
