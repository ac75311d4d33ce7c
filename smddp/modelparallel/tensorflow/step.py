"""`@smp.step`: runs a function once per microbatch, over the ranks of a pipeline."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.util import nest

import smddp.numpy
from smddp.modelparallel.core.arguments import (
    bind,
    check_divisible,
    divide_arguments,
    not_of_the_batch,
)
from smddp.modelparallel.core.errors import SMPError, SMPPartitionError, SMPPeerError, SMPUsageError
from smddp.modelparallel.core.failure import summary
from smddp.modelparallel.tensorflow import job, layers
from smddp.modelparallel.tensorflow import model as model_module
from smddp.modelparallel.tensorflow.division import changed_by_body, used_by_code
from smddp.modelparallel.tensorflow.executor import Executor, Outcome, Work, read
from smddp.modelparallel.tensorflow.gradients import Gradient
from smddp.modelparallel.tensorflow.trace import Trace, trace
from smddp.modelparallel.tensorflow.values import Tensors, as_tensor
from smddp.tensorflow import interrupts

__all__ = ["StepOutput", "step"]

_executor: Executor | None = None


class StepOutput:
    """What a step returns for a tensor of the function: its value in each microbatch.

    Attributes:
        outputs: the values, by microbatch. Those of a variable without a gradient are None. With
            several replicas, those of a gradient are all equal to its mean.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)

    def accumulate(self, method: str = "variable", var: Any = None) -> Any:
        """Returns the mean over the microbatches; None if there is no value.

        Args:
            method: "variable", "add_n" or "accumulate_n"; they give the same.
            var: a variable that gets the mean, too.

        Raises:
            ValueError: there is no such method.
        """
        if method not in ("variable", "add_n", "accumulate_n"):
            raise ValueError(f"accumulate: {method!r} is not variable, add_n or accumulate_n")
        mean = self.reduce_mean()
        if var is not None:
            var.assign(mean)
        return mean

    def reduce_mean(self) -> Any:
        """Returns the mean over the microbatches; a value that is missing in one counts as zero."""
        total = self.reduce_sum()
        return None if total is None else total / tf.cast(len(self.outputs), total.dtype)

    average = reduce_mean

    def reduce_sum(self) -> Any:
        """Returns the sum over the microbatches."""
        present = [tf.convert_to_tensor(one) for one in self.outputs if one is not None]
        return functools.reduce(lambda one, other: one + other, present) if present else None

    def merge(self) -> Any:
        """Returns the values one after the other along dimension 0."""
        if isinstance(self.outputs[0], tf.SparseTensor):
            return tf.sparse.concat(0, self.outputs)
        return tf.concat(self.outputs, 0)

    concat = merge

    def stack(self) -> Any:
        """Returns the values along a new dimension 0, which is the microbatch."""
        return tf.stack(self.outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs})"

    __iter__ = None


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    input_signature: Sequence[Any] | None = None,
    **options: Any,
) -> Any:
    """Makes a function run once per microbatch, on the parts of its arguments.

    All ranks call it, with tensors of the same shapes; the values on rank 0 of a pipeline count.
    The first call traces the function on symbolic tensors, as `tf.function` does, and divides the
    model. Inside a `tf.function` each call does so that is traced, and a call that changes other
    variables than those before.

    Args:
        function: calls the model; returns tensors, also ragged and sparse ones, gradients of
            `optimizer.get_gradients`, and other values, in lists, tuples or dicts.
        non_split_inputs: names of arguments that are not divided.
        input_split_axes: along which dimension to divide, by name; 0 for the others.
        input_signature: a tf.TensorSpec, or a nested structure of them, for each argument that can
            be positional and has no default. They may be passed by name. They are converted to
            tensors of these types; their shapes have to fit, before they are divided.
        options: other arguments of tf.function; without effect.

    Returns:
        A function that returns the structure of the function's result: a `StepOutput` for a
        tensor, a list with an entry per microbatch for another value. Lists of gradients have
        those of this rank's variables, in the order of `model.trainable_variables`; elsewhere, as
        in a named tuple, the gradient of another rank's variable is None in each microbatch.

    Raises:
        TypeError: an option is no argument of tf.function.
        SMPUsageError: the function has other arguments than `input_signature`; an argument cannot
            be divided, or does not fit it.
        SMPPartitionError: the model cannot be divided as asked.
        SMPMicrobatchError: code of the step has failed, on any rank.
        SMPPeerError: another rank is gone, or has failed.
    """
    unknown = options.keys() - inspect.signature(tf.function).parameters.keys()
    if unknown:
        raise TypeError(f"smp.step has no arguments {sorted(unknown)}, and neither has tf.function")
    if function is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            input_signature=input_signature,
            **options,
        )
    body = _Body(function, tuple(non_split_inputs), dict(input_split_axes or {}), input_signature)

    def run(*args: Any, **kwargs: Any) -> Any:
        return body.run(args, kwargs)

    found = tf.autograph.experimental.do_not_convert(functools.update_wrapper(run, function))
    # tf.function would look through these, and call the function itself.
    del run.__wrapped__, found.__wrapped__  # type: ignore[attr-defined]
    return found


class _Traced(NamedTuple):
    """What a trace of a step's function has found out.

    Attributes:
        divided: the model.
        trains: does it ask for gradients?
        outline: of what it returns: a TypeSpec for each tensor.
        asked: numbers of the variables whose gradients it asks for.
        present: of those that have one; empty unless it was traced for a graph.
        changed: see `changed_by_body`.
        used: see `used_by_code`.
    """

    divided: Any
    trains: bool
    outline: Any
    asked: set[int]
    present: set[int]
    changed: list[Any]
    used: list[Any]


class _Body:
    """A function under `smp.step`.

    Attributes:
        traced: in its first call since `smp.init`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        whole: tuple[str, ...],
        axes: Mapping[str, int],
        signature: Sequence[Any] | None,
    ) -> None:
        self.function, self.whole, self.axes = function, whole, axes
        self.specs = {} if signature is None else bind(function, signature, {}).arguments
        self.traced: _Traced | None = None

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a step, or in a graph makes an operation that runs it."""
        if layers.current() is not None:
            raise SMPUsageError("a function under smp.step cannot call another one")
        traced, is_eager = self.traced, tf.executing_eagerly()
        if traced is None or not model_module.is_current(traced.divided):
            with tf.init_scope():
                traced = self.traced = self._prepare(args, kwargs, not is_eager)
        elif not is_eager:
            # With other shapes, or other values of Python, the function may return something else.
            with tf.init_scope():
                traced = self._traced_again(args, kwargs)
        if not is_eager:
            return self._in_graph(traced, args, kwargs)
        outcome = self._run(traced, args, kwargs)
        return self._collected(traced, outcome)

    def _prepare(self, args: Any, kwargs: Any, in_graph: bool) -> _Traced:
        """Traces the function, and divides the model if that has not been done."""
        with job.together("the first call of a step"):
            model = model_module.current()
            traced = self._planned(model, args, kwargs, in_graph)
        model_module.divide(model, traced.divided)
        return traced

    def _traced_again(self, args: Any, kwargs: Any) -> _Traced:
        try:
            return self._planned(model_module.current(), args, kwargs, True)
        except Exception as error:
            _shared_executor().refuse(error)
            self._end(error)
            raise

    def _planned(self, model: Any, args: Any, kwargs: Any, in_graph: bool) -> _Traced:
        count = job.cfg().microbatches
        found = self._trace(self._parts(args, kwargs, count, _shapes)[0], in_graph)
        return _traced(found, model_module.plan(model, found))

    def _parts(self, args: Any, kwargs: Any, count: int, pieces: Any) -> Any:
        if self.specs:
            bound = bind(self.function, args, kwargs)
            for name, spec in self.specs.items():
                if name in bound.arguments:
                    bound.arguments[name] = _fitted(name, bound.arguments[name], spec)
            args, kwargs = bound.args, bound.kwargs
        return divide_arguments(self.function, args, kwargs, count, self.whole, self.axes, pieces)

    def _run(self, traced: _Traced, args: Any, kwargs: Any) -> Outcome:
        """Runs a step; returns what `Executor.run` does."""
        if not model_module.is_current(traced.divided):
            raise SMPUsageError(
                f"a tf.function calls the step {self.function.__name__!r}, and was traced before "
                "smp.shutdown(): make a new tf.function"
            )
        cfg, executor = job.cfg(), _shared_executor()
        error: BaseException | None = None
        try:
            try:
                work = Work(
                    self.function,
                    self._parts(args, kwargs, cfg.microbatches, _pieces),
                    traced.trains,
                    traced.changed,
                    cfg.active_microbatches if job.pp_size() > 1 else 1,
                    cfg.pipeline == "simple",
                )
            except Exception as refused:
                executor.refuse(refused)
                raise
            outcome = executor.run(traced.divided, work)
            if outcome.unknown and job.pp_size() > 1:
                self._send_more(traced, outcome, args, kwargs)
        except BaseException as raised:  # also Ctrl-C: ranks of other replicas wait for this one
            error = raised
        self._end(error)
        return outcome

    def _send_more(self, traced: _Traced, outcome: Outcome, args: Any, kwargs: Any) -> None:
        """Gives other ranks the values of variables to which the function did not assign before.

        Its trace, on all ranks, tells which these are.
        """
        error: BaseException | None = None
        more, unseen, values = list[Any](), set[int](), list[Any]()
        try:
            again = self._planned(model_module.current(), args, kwargs, False)
            known = traced.divided.handles | set(map(id, traced.changed))
            more = [handle for handle in again.changed if id(handle) not in known]
            unseen = outcome.assigned.keys() - known - {id(handle) for handle in more}
            if job.pp_rank() == 0:
                values = [read(handle).numpy() for handle in more]
        except Exception as raised:
            error = raised
        said = None if error is None else summary(error)
        forms = str([handle._handle_data for handle in more])  # shapes and types
        answers = job.exchange("pp", (said, forms, bool(unseen), values))
        failed = [f"rank {rank}: {text}" for rank, (text, *_) in enumerate(answers) if text]
        if failed:
            raise error or SMPPeerError(
                f"the trace of step {self.function.__name__!r} has failed on {failed[0]}"
            )
        if answers[0][2] or len({found for _, found, *_ in answers}) > 1:
            raise SMPUsageError(
                f"step {self.function.__name__!r} has changed a variable that it did not change "
                "before, and that other ranks cannot find, because they do not run the function: "
                "whether it changes a variable may depend on its arguments only"
            )
        if job.pp_rank() > 0:
            for handle, value in zip(more, answers[0][3], strict=True):
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        traced.changed.extend(more)

    def _end(self, error: BaseException | None) -> None:
        if job.dp_size() > 1:
            job.agree(error, "the step")
        elif error is not None:
            raise error

    def _trace(self, part: Any, in_graph: bool) -> Any:
        try:
            args, kwargs = part
            return trace(self.function, args, kwargs, in_graph)
        except SMPError:
            raise
        except Exception as error:
            raise SMPPartitionError(
                f"smp.step: {self.function.__name__!r} cannot be traced on symbolic tensors, as "
                f"tf.function does it: {type(error).__name__}: {error}"
            ) from error

    def _in_graph(self, traced: _Traced, args: Any, kwargs: Any) -> Any:
        """Returns symbolic results of a step, which an operation of the graph runs."""
        count = job.cfg().microbatches
        divided, outline = traced.divided, traced.outline
        mine = sorted(divided.mine & traced.present)
        # A ragged or sparse tensor consists of several.
        specs = [
            spec
            for leaf in tf.nest.flatten(outline)
            if isinstance(leaf, tf.TypeSpec)
            for _ in range(count)
            for spec in tf.nest.flatten(leaf, expand_composites=True)
        ]
        for number in mine:
            variable = divided.trainable[number]
            specs += [tf.TensorSpec(variable.shape, variable.dtype)] * count
        whole = list(args), dict(kwargs)
        leaves = tf.nest.flatten(whole, expand_composites=True)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]

        def run(*values: Any) -> list[Any]:
            given = list(leaves)
            for place, value in zip(places, values, strict=False):
                given[place] = value
            with interrupts.waiting():
                outcome = self._run(
                    traced, *tf.nest.pack_sequence_as(whole, given, expand_composites=True)
                )
            columns = zip(*(tf.nest.flatten(one) for one in outcome.returned), strict=True)
            found = [
                value
                for leaf in columns
                if isinstance(leaf[0], Tensors)
                for value in tf.nest.flatten(leaf, expand_composites=True)
            ]
            gradients = self._gradients(traced, outcome.sums)
            self._check_absent(traced, gradients)
            for number in mine:
                found += gradients[number].outputs
            return [
                tf.zeros(spec.shape, spec.dtype) if value is None else tf.convert_to_tensor(value)
                for value, spec in zip(found, specs, strict=True)
            ]

        # The variables are arguments, so that the graph runs this after what assigns to them.
        handles = [
            *(as_tensor(one).handle for one in filter(divided.is_mine, divided.weights)),
            *traced.used,
        ]
        made = tf.py_function(
            run, [*(leaves[place] for place in places), *handles], [spec.dtype for spec in specs]
        )
        made = made if specs else []  # it is an operation then
        for value, spec in zip(made, specs, strict=True):
            value.set_shape(spec.shape)
        results = iter(made)

        def value_of(spec: tf.TypeSpec) -> Any:
            parts = [next(results) for _ in tf.nest.flatten(spec, expand_composites=True)]
            return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)

        outputs = {
            id(leaf): StepOutput([value_of(leaf) for _ in range(count)])
            for leaf in tf.nest.flatten(outline)
            if isinstance(leaf, tf.TypeSpec)
        }
        gradients = {number: StepOutput([next(results) for _ in range(count)]) for number in mine}
        missing = StepOutput([None] * count)

        def joined(leaf: Any) -> Any:
            if isinstance(leaf, Gradient):
                return gradients.get(leaf.number, missing)
            return outputs[id(leaf)] if id(leaf) in outputs else [leaf] * count

        return tf.nest.map_structure(joined, _own(outline, divided.mine))

    def _check_absent(self, traced: _Traced, gradients: dict[int, StepOutput]) -> None:
        """Raises if there is a gradient that there was not when the step was traced for a graph.

        Raises:
            SMPUsageError: there is one, on any rank of the pipeline.
        """
        absent = traced.asked - traced.present  # the same on all ranks
        if not absent:
            return
        found = []
        for number in traced.divided.mine & absent:
            total = gradients[number].reduce_sum()
            if total is not None and np.any(total):
                found.append(traced.divided.trainable[number].name)
        for name in itertools.chain(*job.exchange("pp", found)):
            raise SMPUsageError(
                f"step {self.function.__name__!r}: variable {name!r} has a gradient, and had none "
                "when tf.function traced the step: the function does something else now. Let it "
                "depend on its arguments only"
            )

    def _gradients(self, traced: _Traced, sums: list[dict[int, Any]]) -> dict[int, StepOutput]:
        """Returns the gradients of this rank's variables, averaged over replicas."""
        values = {
            number: StepOutput([found.get(number) for found in sums])
            for number in sorted(traced.divided.mine)
        }
        if traced.trains and job.dp_size() > 1:
            _average(values, traced.divided.trainable)
        return values

    def _collected(self, traced: _Traced, outcome: Outcome) -> Any:
        gradients = self._gradients(traced, outcome.sums)

        def joined(*leaves: Any) -> Any:
            if isinstance(leaves[0], Gradient):
                return gradients[leaves[0].number]
            return StepOutput(leaves) if isinstance(leaves[0], Tensors) else list(leaves)

        try:
            return tf.nest.map_structure(
                joined, *(_own(result, traced.divided.mine) for result in outcome.returned)
            )
        except (TypeError, ValueError) as error:
            raise SMPUsageError(
                f"smp.step: the microbatches returned values of different structures: {error}"
            ) from None


def _traced(found: Trace, planned: Any) -> _Traced:
    numbers = planned.numbers_of(found.asked)

    def outline_of(leaf: Any) -> Any:
        if isinstance(leaf, Gradient):
            return Gradient(numbers[leaf.number])
        return tf.type_spec_from_value(leaf) if isinstance(leaf, Tensors) else leaf

    present = {number for number, there in zip(numbers, found.present, strict=False) if there}
    outline = tf.nest.map_structure(outline_of, found.result)
    used = used_by_code(planned.model, found)
    changed = changed_by_body(planned.model, planned.division, found, used)
    return _Traced(planned, found.trains, outline, set(numbers), present, changed, used)


def _own(value: Any, mine: set[int]) -> Any:
    """Returns a value without the gradients of other ranks."""

    def kept(one: Any) -> bool:
        return not isinstance(one, Gradient) or one.number in mine

    if isinstance(value, dict):
        return {key: _own(one, mine) for key, one in value.items() if kept(one)}
    if isinstance(value, list):
        return [_own(one, mine) for one in value if kept(one)]
    if type(value) is tuple:
        return tuple(_own(one, mine) for one in value if kept(one))
    if isinstance(value, tuple):  # a named one, whose fields stay
        return type(value)(*(_own(one, mine) for one in value))
    return value if kept(value) else None


def _average(values: dict[int, StepOutput], variables: Sequence[Any]) -> None:
    """Averages gradients over microbatches and replicas, all at once."""
    group = job.group("dp")
    means = {number: output.reduce_mean() for number, output in values.items()}
    # A gradient that is missing on one replica may be there on another.
    there = np.array([mean is not None for mean in means.values()], np.int32)
    there = group.allreduce(there) if there.size else there
    kinds: dict[Any, list[int]] = {}
    for count, (number, mean) in zip(there, means.items(), strict=True):
        if count:
            if mean is None:
                variable = variables[number]
                mean = means[number] = tf.zeros(variable.shape, variable.dtype)
            kinds.setdefault(mean.dtype, []).append(number)
    for kind in sorted(kinds, key=lambda one: str(one.name)):
        numbers = kinds[kind]
        flat = np.concatenate([means[number].numpy().reshape(-1) for number in numbers])
        group.allreduce(flat, op=smddp.numpy.Op.AVERAGE, out=flat)
        place = 0
        for number in numbers:
            shape = means[number].shape
            count = shape.num_elements()
            mean = tf.constant(flat[place : place + count].reshape(shape))
            place += count
            values[number] = StepOutput([mean] * len(values[number].outputs))


def _fitted(name: str, value: Any, specs: Any) -> Any:
    """Converts an argument to its part of an `input_signature`.

    A symbolic tensor of another type becomes a tf.TensorSpec: it cannot be converted where a step
    is traced, and only its shape counts there.

    Raises:
        SMPUsageError: it does not fit.
    """

    def fit(spec: Any, leaf: Any) -> Any:
        if isinstance(spec, tf.TensorSpec):
            is_symbolic = tf.is_tensor(leaf) and not hasattr(leaf, "numpy")
            if not is_symbolic:
                leaf = tf.cast(leaf, spec.dtype)
            elif leaf.dtype != spec.dtype:
                leaf = tf.TensorSpec(leaf.shape, spec.dtype)
        if isinstance(spec, tf.TypeSpec) and not spec.is_compatible_with(leaf):
            raise ValueError(f"{spec} was expected, and it is {leaf}")
        return leaf

    try:
        return nest.map_structure_up_to(specs, fit, specs, value, check_types=False)
    except Exception as error:
        raise SMPUsageError(
            f"smp.step: argument {name!r} does not fit its input_signature: {error}"
        ) from None


def _pieces(name: str, value: Any, count: int, whole: bool, axis: int) -> list[Any]:
    if whole:
        return [value] * count

    def divide(leaf: Any) -> list[Any]:
        if isinstance(leaf, tf.IndexedSlices | tf.experimental.ExtensionType):
            raise SMPUsageError(
                f"argument {name!r} has a {type(leaf).__name__}, which cannot be divided into "
                f"microbatches: pass its tensors. {not_of_the_batch(name)}."
            )
        if not isinstance(leaf, Tensors | np.ndarray):
            return [leaf] * count
        tensor = tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
        if count == 1:
            return [tensor]
        drop_last = "drop_remainder=True in batch()"
        check_divisible(name, tuple(tensor.shape), count, axis, drop_last)
        if isinstance(tensor, tf.SparseTensor):
            return list(tf.sparse.split(sp_input=tensor, num_split=count, axis=axis))
        return list(tf.split(tensor, count, axis))

    if hasattr(value, "smp_slice"):
        return [value.smp_slice(count, number, axis) for number in range(count)]
    leaves = [divide(leaf) for leaf in tf.nest.flatten(value)]
    return [
        tf.nest.pack_sequence_as(value, [leaf[number] for leaf in leaves])
        for number in range(count)
    ]


def _shapes(name: str, value: Any, count: int, whole: bool, axis: int) -> list[Any]:
    """Returns what `_pieces` does, with type and shape in place of tensors; also of symbolic ones.

    Shapes that cannot be divided are left to `_pieces`.
    """

    def divide(leaf: Any) -> Any:
        if not isinstance(leaf, Tensors | tf.TensorSpec | np.ndarray):
            return leaf
        spec = leaf if isinstance(leaf, tf.TensorSpec) else tf.type_spec_from_value(leaf)
        shape = None if spec.shape.rank is None else spec.shape.as_list()
        if not whole and shape is not None and -len(shape) <= axis < len(shape):
            shape[axis] = None if shape[axis] is None else shape[axis] // count
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
        kind = tf.SparseTensorSpec if isinstance(spec, tf.SparseTensorSpec) else tf.TensorSpec
        return kind(shape, spec.dtype)

    if not whole and hasattr(value, "smp_slice"):
        return [value.smp_slice(count, number, axis) for number in range(count)]
    return [tf.nest.map_structure(divide, value)] * count


def _shared_executor() -> Executor:
    global _executor
    if _executor is None:
        _executor = Executor(job.group("channel"), job.seconds())
        job.at_shutdown(_forget)
    return _executor


def _forget() -> None:
    global _executor
    executor, _executor = _executor, None
    if executor is not None:
        executor.close()
