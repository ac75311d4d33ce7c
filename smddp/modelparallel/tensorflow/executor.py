"""One rank's part in the steps of a pipeline: the body on rank 0, and layers where they live.

Rank 0 of the pipeline runs the script's function once for each microbatch. A call of a layer that
another rank owns goes there as a message, and the caller waits for the result; other microbatches
run meanwhile. The owner keeps a tape of the call. At the caller the result is that of a function
whose gradient is another message: the owner computes the gradients of its weights, keeps them, and
answers with those of the arguments. Code of a layer may call layers of other ranks in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf
from tensorflow.python.eager import record

import smddp.numpy
from smddp.modelparallel.core.baton import Baton, Host, Priority, Task, Ticket
from smddp.modelparallel.core.errors import SMPError, SMPPartitionError, SMPPeerError, SMPUsageError
from smddp.modelparallel.core.failure import Failure, as_error, describe
from smddp.modelparallel.core.progress import Progress
from smddp.modelparallel.tensorflow import layers
from smddp.modelparallel.tensorflow.channel import Channel, Kind, Message
from smddp.modelparallel.tensorflow.gradients import Gradient
from smddp.modelparallel.tensorflow.trace import code_of_the_script
from smddp.modelparallel.tensorflow.values import pack, results, unpack

__all__ = ["Divided", "Executor", "Outcome", "Work", "read"]

_SLICE = 0.1  # seconds between looks at Ctrl-C


class Divided(Protocol):
    """The model, as a step needs it.

    Attributes:
        layers: all layers.
        owners: the rank of each; None for one that runs where it is called.
        names: of the layers, for errors.
        numbers: of the layers, by id.
        variables: numbers of the trainable variables, by the id of the variable of TensorFlow.
        mine: numbers of those that this rank owns.
    """

    layers: list[Any]
    owners: list[int | None]
    names: list[str]
    numbers: dict[int, int]
    variables: dict[int, int]
    mine: set[int]

    @property
    def handles(self) -> set[int]:
        """Ids of the handles of all variables."""

    def numbers_of(self, variables: Sequence[Any]) -> list[int]:
        """Returns the numbers of trainable variables; raises SMPUsageError."""


class Work:
    """One call of a step.

    Attributes:
        name: of the function.
        function: runs once per microbatch.
        parts: (positional, named) arguments of each microbatch.
        trains: it asks for gradients.
        changed: handles of variables, not of the model, that the function may assign to.
        microbatches, active, simple: see `Progress`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        parts: Sequence[tuple[list[Any], dict[str, Any]]],
        trains: bool,
        changed: Sequence[Any],
        active: int,
        simple: bool,
    ) -> None:
        self.name = function.__name__
        self.function, self.parts, self.trains = function, parts, trains
        self.changed = changed
        self.microbatches, self.active, self.simple = len(parts), active, simple


class Outcome(NamedTuple):
    """What a step has made.

    Attributes:
        returned: what the function has returned, by microbatch.
        sums: by microbatch, the gradients of variables of this rank, by their numbers.
        assigned: on rank 0, the handles of the variables that the function has assigned to.
        unknown: is one of them neither in `Work.changed` nor of the model?
    """

    returned: list[Any]
    sums: list[dict[int, Any]]
    assigned: dict[int, Any]
    unknown: bool


class _Call:
    """A message that waits for its answer.

    Attributes:
        ticket: done when the answer has come.
        answer: the message.
        text: what this rank waits for, for errors.
    """

    def __init__(self, text: str) -> None:
        self.ticket, self.text = Ticket(), text
        self.answer: Message | None = None


class _Kept:
    """What the owner of a layer keeps of a call until its backward pass."""

    def __init__(self, frame: _Frame, inputs: list[Any], outputs: list[Any]) -> None:
        self.frame, self.inputs, self.outputs = frame, inputs, outputs


class _Frame:
    """Where a task stands in the program; the interceptor of its thread.

    Attributes:
        microbatch: its number.
        path: for each caller on the way from the body, how many calls it had made before.
        tape: records what it runs; None if no gradients are wanted, or they have been computed.
        anchor: a tensor that the tape watches; calls of other ranks depend on it, so that the tape
            records them even if none of their arguments needs a gradient.
        training: the argument `training` of the innermost call that has it.
        forward: is it forward work?
    """

    def __init__(
        self, executor: Executor, microbatch: int, path: tuple[int, ...], training: Any = None
    ) -> None:
        self._executor = executor
        self.microbatch, self.path, self.training = microbatch, path, training
        self.tape: Any = None
        self.anchor = tf.zeros([])
        self.forward = True
        self._calls = 0

    @property
    def priority(self) -> Priority:
        """That of the work it does next."""
        order = self.path if self.forward else tuple(-number for number in self.path)
        return Priority(self.forward, self.microbatch, order)

    def next_path(self) -> tuple[int, ...]:
        """Returns the path of its next call."""
        self._calls += 1
        return (*self.path, self._calls)

    def called(
        self, layer: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Runs a call here, or where the layer lives; see `Interceptor`."""
        number, owner = self._executor.home(layer)
        given = layers.training_of(layer, args, kwargs)
        training = self.training if given is None else given
        if owner is not None and owner != self._executor.rank:
            return self._executor.call(self, number, owner, args, kwargs, training)
        outer, self.training = self.training, training
        try:
            return original(*args, **layers.with_training(layer, args, kwargs, training))
        finally:
            self.training = outer

    def gradients(self, loss: Any, variables: Sequence[Any]) -> list[Gradient]:
        """Computes gradients; see `gradients.install`."""
        return self._executor.gradients(self, loss, variables)


class Executor(Host):
    """Runs the steps of a pipeline on one rank; `Baton` decides what runs next.

    Attributes:
        rank: of this process in the pipeline.
    """

    def __init__(self, group: smddp.numpy.Group, timeout: float) -> None:
        """Begins no step yet.

        Args:
            group: the ranks of the pipeline; nothing else sends messages in it.
            timeout: seconds that this rank waits for a message.
        """
        self.rank = group.rank
        self._channel = Channel(group, timeout)
        self._baton = Baton(self, self)
        self._lock = threading.Lock()
        self._step = 0
        self._numbers = itertools.count()
        self._early: list[Message] = []
        self._broken = ""
        self._over = threading.Event()
        self._over.set()
        self._reset()

    def close(self) -> None:
        """Ends the threads, and a receive that is left of a failed step."""
        self._channel.close()
        self._baton.close()

    def _reset(self) -> None:
        """Forgets what belongs to one step."""
        self._model: Divided | None = None
        self._work: Work | None = None
        self._progress: Progress | None = None
        self._returned: list[Any] = []
        self._calls: dict[int, _Call] = {}
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._answers: set[int] = set()
        self._failure: Failure | None = None
        self._sums: list[dict[int, Any]] = []
        self._assigned: dict[int, Any] = {}
        self._unknown = False

    # --- a step -----------------------------------------------------------------------------------

    def run(self, model: Divided, work: Work) -> Outcome:
        """Runs a step; all ranks of the pipeline call it.

        Raises:
            SMPMicrobatchError: code of the step has failed, on any rank.
            SMPPeerError: another rank is gone, or has not come.
        """
        self._step += 1
        if self._broken:
            raise SMPPeerError(f"an earlier step has lost a rank: {self._broken}")
        self._model, self._work = model, work
        self._sums = [{} for _ in range(work.microbatches)]
        self._returned = [None] * work.microbatches
        self._over.clear()
        self._baton.begin()
        try:
            if self.rank == 0:
                self._progress = Progress(self._baton, work.microbatches, work.active, work.simple)
                outline = (work.name, work.microbatches, work.trains)
                for peer in self._channel.peers:
                    self._send(peer, Kind.BEGIN, outline)
                self._baton.submit(Task(Priority(True, -1), self._start_more))
            early, self._early = self._early, []
            self.deliver(early)
            self._baton.wake()
            while not self._over.wait(_SLICE):
                pass
            self._baton.wait_until_idle()
        except BaseException as error:
            self._fail(describe(-1, self.rank, _reason(error)))
            self._channel.interrupt()
            self._baton.wait_until_idle()
            raise
        finally:
            failure = self._failure
            outcome = Outcome(self._returned, self._sums, self._assigned, self._unknown)
            self._reset()
        if failure is not None:
            where = f"rank {failure.rank} of the pipeline"
            raise as_error(failure, where)
        try:
            self._channel.flush()
        except (TimeoutError, smddp.numpy.Error) as error:
            self._broken = str(error)
            raise SMPPeerError(str(error)) from error
        return outcome

    def refuse(self, error: BaseException) -> None:
        """Counts a step that this rank cannot begin, and lets it fail on the other ranks."""
        self._step += 1
        self._tell(describe(-1, self.rank, _reason(error)))

    def _start_more(self) -> None:
        assert self._progress is not None
        for number in self._progress.start_more():
            frame = _Frame(self, number, ())
            self._submit(frame, functools.partial(self._body, frame))

    def _submit(self, frame: _Frame, function: Callable[[], None]) -> None:
        def run() -> None:
            with layers.intercepted(frame):
                function()

        task = Task(frame.priority, run)
        task.frame = frame
        self._baton.submit(task)

    def _body(self, frame: _Frame) -> None:
        """The task of one microbatch."""
        model, work, progress = self._model, self._work, self._progress
        assert model is not None
        assert work is not None
        assert progress is not None
        args, kwargs = work.parts[frame.microbatch]
        with tf.GradientTape() if work.trains else contextlib.nullcontext() as frame.tape:
            if frame.tape is not None:
                frame.tape.watch(frame.anchor)
            with code_of_the_script(assigned=self._assigned):
                result = results(work.function(*args, **kwargs))
        frame.tape = None
        self._returned[frame.microbatch] = result
        if progress.end(frame.microbatch):
            changed = [read(handle) for handle in work.changed]
            others = self._assigned.keys() - model.handles
            self._unknown = not others.issubset(map(id, work.changed))
            packed, tensors = pack((self._returned, changed, self._unknown))
            for peer in self._channel.peers:
                self._send(peer, Kind.END, packed, tensors)
            if not self._channel.peers:
                self._over.set()
        else:
            self._start_more()
            progress.release()

    def gradients(self, frame: _Frame, loss: Any, variables: Sequence[Any]) -> list[Gradient]:
        """Computes the gradients of a loss on all ranks; see `_Frame.gradients`."""
        model, progress = self._model, self._progress
        assert model is not None
        numbers = model.numbers_of(variables)
        if progress is None or frame.path:
            raise SMPUsageError("optimizer.get_gradients works in the step's function only")
        if self._work is not None and not self._work.trains:
            raise SMPUsageError(
                "optimizer.get_gradients: this step's function did not call it in its first call"
            )
        if frame.tape is None:
            raise SMPUsageError(
                "optimizer.get_gradients can be called once in a step's function: add the losses"
            )
        ticket = progress.reach_backward(frame.microbatch)
        frame.forward = False
        if ticket is not None:
            self._baton.wait(ticket, frame.priority, yields=True)
        tape, frame.tape = frame.tape, None
        self._differentiate(frame, tape, loss, [], None)
        frame.forward = True
        return [Gradient(number) for number in numbers]

    def _differentiate(
        self, frame: _Frame, tape: Any, targets: Any, inputs: list[Any], given: Any
    ) -> list[Any]:
        """Adds the gradients of this rank's variables to the sums; returns those of `inputs`."""
        model = self._model
        assert model is not None
        watched = {
            number: variable
            for variable in tape.watched_variables()
            if (number := model.variables.get(id(variable))) in model.mine
        }
        sources = [*inputs, frame.anchor, *watched.values()]
        with code_of_the_script(False):
            found = tape.gradient(targets, sources, output_gradients=given)
        sums = self._sums[frame.microbatch]
        for number, gradient in zip(watched, found[len(inputs) + 1 :], strict=True):
            if gradient is not None:
                assert number is not None
                sums[number] = gradient if number not in sums else _sum(sums[number], gradient)
        return list(found[: len(inputs)])

    # --- calls ------------------------------------------------------------------------------------

    def home(self, layer: Any) -> tuple[int, int | None]:
        """Returns number and owner of a layer.

        Raises:
            SMPPartitionError: it has none.
        """
        model = self._model
        assert model is not None
        number = model.numbers.get(id(layer))
        if number is not None:
            owner = model.owners[number]
            if owner == self.rank and not layer.built:
                raise SMPPartitionError(
                    f"layer {model.names[number]!r} is called for the first time after the model "
                    "was divided: call it in the first step, or build it before"
                )
            return number, owner
        if layer.weights:
            raise SMPPartitionError(
                f"layer {layer.name!r} belongs to no partition: it was made after the first step, "
                "or it is no part of the smp.DistributedModel"
            )
        return -1, None

    def call(
        self, frame: _Frame, number: int, owner: int, args: Any, kwargs: Any, training: Any
    ) -> Any:
        """Runs a layer on its owner, and returns its result."""
        model = self._model
        assert model is not None
        name = model.names[number]
        packed, tensors = pack((args, kwargs))
        if not tf.executing_eagerly():
            raise SMPUsageError(
                f"layer {name!r} is on partition {owner}, and code inside tf.function calls it: "
                "take tf.function away from that code"
            )
        records = frame.tape is not None
        wanted = [
            place
            for place, tensor in enumerate(tensors if records else ())
            if _has_gradient(tensor) and record.should_record_backprop([tensor])
        ]
        path = frame.next_path()
        identity = next(self._numbers)
        header = identity, frame.microbatch, path, number, training, records, wanted, packed
        answer = self._ask(
            *(frame, identity, owner, Kind.CALL, header, tensors),
            f"layer {name!r} on rank {owner} of the pipeline",
        )
        results = list(answer.tensors)
        if records:
            places = [place for place, one in enumerate(results) if _has_gradient(one)]
            inputs = [tensors[place] for place in wanted]
            made = self._join(frame, identity, owner, name, inputs, [results[i] for i in places])
            for place, one in zip(places, made, strict=True):
                results[place] = one
        return unpack(answer.header[1], results)

    def _join(
        self,
        frame: _Frame,
        identity: int,
        owner: int,
        name: str,
        inputs: list[Any],
        outputs: list[Any],
    ) -> list[Any]:
        """Makes `outputs` depend on `inputs` for the tape; the gradient is a message."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def remote(anchor: Any, *given: Any) -> Any:
            def gradient(*upstream: Any) -> Any:
                running = layers.current()
                assert isinstance(running, _Frame)
                dense = [tf.convert_to_tensor(one) for one in upstream]
                answer = self._ask(
                    *(running, identity, owner, Kind.BACKWARD, (identity,), dense),
                    f"gradients of layer {name!r} from rank {owner} of the pipeline",
                )
                found: list[Any] = [None] * len(inputs)
                for place, one in zip(answer.header[1], answer.tensors, strict=True):
                    found[place] = one
                return (tf.zeros_like(anchor), *found)

            return tuple(tf.identity(one) for one in outputs), gradient

        return list(remote(frame.anchor, *inputs)) if outputs else []

    def _ask(
        self,
        frame: _Frame,
        identity: int,
        owner: int,
        kind: Kind,
        header: Any,
        tensors: Sequence[Any],
        text: str,
    ) -> Message:
        """Sends a message, and waits for its answer; other tasks run meanwhile."""
        call = self._calls[identity] = _Call(text)
        self._send(owner, kind, header, tensors)
        self._baton.wait(call.ticket, frame.priority)
        assert call.answer is not None
        return call.answer

    def _run_call(self, frame: _Frame, message: Message) -> None:
        """The task of a call that another rank has made."""
        identity, _, _, number, _, records, wanted, packed = message.header
        model = self._model
        assert model is not None
        layer = model.layers[number]
        args, kwargs = unpack(packed, message.tensors)
        inputs = [message.tensors[place] for place in wanted]
        with tf.GradientTape() if records else contextlib.nullcontext() as frame.tape:
            if frame.tape is not None:
                frame.tape.watch([frame.anchor, *inputs])
            with code_of_the_script():
                result = layer(*args, **kwargs)
        outline, tensors = pack(result)
        if records:
            outputs = [one for one in tensors if _has_gradient(one)]
            self._kept[message.sender, identity] = _Kept(frame, inputs, outputs)
        self._send(message.sender, Kind.RESULT, (identity, outline), tensors)

    def _run_backward(self, kept: _Kept, message: Message) -> None:
        """The task of the backward pass of a call that another rank has made."""
        (identity,) = message.header
        frame = kept.frame
        tape, frame.tape = frame.tape, None
        found = self._differentiate(*(frame, tape, kept.outputs, kept.inputs, message.tensors))
        places = [place for place, one in enumerate(found) if one is not None]
        dense = [tf.convert_to_tensor(found[place]) for place in places]
        self._send(message.sender, Kind.GRADIENTS, (identity, places), dense)

    # --- messages; the baton calls these ----------------------------------------------------------

    @property
    def expects(self) -> bool:
        """Says whether messages may still come."""
        return not self._over.is_set()

    def take(self, block: bool) -> list[Message]:
        """Returns the messages that have come; see `Inbox`."""
        if not self._channel.peers:
            return []
        try:
            return self._channel.take(block)
        except TimeoutError as error:
            waits = [call.text for call in self._calls.values() if not call.ticket.done]
            if not waits:
                missing = set(self._channel.peers) - self._answers
                what = "the end of the step from" if self.rank == 0 else "anything from"
                waits = [f"{what} rank(s) {sorted(missing)} of the pipeline"]
            lost = SMPPeerError(f"{error}; this rank waits for {' and '.join(waits)}")
        except smddp.numpy.Error as error:
            lost = SMPPeerError(str(error))
        self._broken = str(lost)
        self._fail(describe(-1, self.rank, lost))
        return []

    def interrupt(self) -> None:
        """Ends the `take` that waits; see `Inbox`."""
        self._channel.interrupt()

    def deliver(self, arrived: list[Message]) -> None:
        """Acts upon messages; see `Inbox`."""
        for message in arrived:
            if message.step > self._step or not self.expects:
                self._early.append(message)
            elif message.step == self._step:
                try:
                    self._act(message)
                except Exception as error:
                    self._fail(describe(-1, self.rank, error))

    def _act(self, message: Message) -> None:
        kind, header = message.kind, message.header
        if kind is Kind.BEGIN:
            self._check_begin(header)
        elif kind is Kind.CALL:
            frame = _Frame(self, header[1], header[2], header[4])
            self._submit(frame, functools.partial(self._run_call, frame, message))
        elif kind is Kind.BACKWARD:
            kept = self._kept.pop((message.sender, header[0]))
            kept.frame.forward = False
            self._submit(kept.frame, functools.partial(self._run_backward, kept, message))
        elif kind in (Kind.RESULT, Kind.GRADIENTS):
            call = self._calls.pop(header[0])
            call.answer = message
            self._baton.complete(call.ticket)
        elif kind is Kind.FAILED:
            self._fail(header)
        elif self.rank == 0:
            self._answers.add(message.sender)
            if len(self._answers) == len(self._channel.peers):
                self._over.set()
        else:
            assert self._work is not None
            self._returned, changed, self._unknown = unpack(header, message.tensors)
            for handle, value in zip(self._work.changed, changed, strict=True):
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            self._send(0, Kind.END, None)
            self._over.set()

    def _check_begin(self, outline: Any) -> None:
        work = self._work
        assert work is not None
        mine = (work.name, work.microbatches, work.trains)
        if outline != mine:
            raise SMPUsageError(
                f"rank 0 of the pipeline runs step {outline[0]!r}, and rank {self.rank} runs "
                f"{mine[0]!r}: all ranks have to call the same steps in the same order"
            )

    def _send(self, peer: int, kind: Kind, header: Any, tensors: Sequence[Any] = ()) -> None:
        self._channel.send(peer, kind, self._step, header, tensors)

    # --- failures ---------------------------------------------------------------------------------

    def task_failed(self, task: Task, error: BaseException) -> None:
        """Ends the step; see `Host`."""
        microbatch = -1 if task.frame is None else task.frame.microbatch
        if isinstance(error, smddp.numpy.Error):
            self._broken = str(error)
            microbatch, error = -1, SMPPeerError(str(error))
        self._fail(describe(microbatch, self.rank, error))

    def _fail(self, failure: Failure) -> None:
        """Ends the step. A failure of this rank goes to all ranks of the pipeline."""
        with self._lock:
            if self._over.is_set():
                return
            self._failure = failure
            self._over.set()
        if failure.rank == self.rank:
            self._tell(failure)
        self._baton.abort()

    def _tell(self, failure: Failure) -> None:
        for peer in self._channel.peers:
            with contextlib.suppress(Exception):
                self._send(peer, Kind.FAILED, failure)


def _reason(error: BaseException) -> BaseException:
    """Returns an exception that other ranks may get, for one that ends this process."""
    return error if isinstance(error, Exception) else SMPError(f"interrupted: {error!r}")


def _has_gradient(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _sum(one: Any, other: Any) -> Any:
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def read(handle: Any) -> Any:
    """Returns the value of a variable."""
    dtype = tf.as_dtype(handle._handle_data.shape_and_type[0].dtype)
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
