"""How arguments are divided, and how results are combined."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.api.step import step
from smddp.modelparallel.torch.common.structure import flatten, rebuild
from smddp.modelparallel.torch.pipeline.microbatch import (
    StepOutput,
    collect,
    split_arguments,
    unequal_lengths,
)


class Pair(NamedTuple):
    one: Any
    two: Any


class Output(collections.OrderedDict):
    """Like the outputs of model libraries: items are attributes, too, and integers positions."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


class Encoding(collections.UserDict):
    """Like the outputs of tokenizers; it has other attributes besides its items."""

    def __init__(self, data: Any, origin: str) -> None:
        super().__init__(data)
        self.origin = origin


@dataclasses.dataclass
class Named:
    a: Any
    b: Any = None


@dataclasses.dataclass
class Later:
    a: Any
    b: Any = dataclasses.field(init=False)  # not set


class Sliced:
    def __init__(self, values: list[int]) -> None:
        self.values = values

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Sliced:
        size = len(self.values) // num_mb
        return Sliced(self.values[mb * size : (mb + 1) * size])


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(3),
        [torch.zeros(1), (torch.ones(1), None)],
        {"a": torch.zeros(2), 3: [True, 1, 1.5, "x"]},
        Pair(torch.zeros(1), 2),
        torch.randn(2, 2).max(dim=0),
        Named(torch.zeros(1)),
        Later(torch.zeros(1)),
        Output(loss=torch.zeros(()), logits=torch.ones(2)),
        collections.defaultdict(list, {"a": torch.zeros(1)}),
        Encoding({"input_ids": torch.zeros(2), "mask": None}, "here"),
        object,
    ],
)
def test_structures_survive(value: Any) -> None:
    tensors: list[torch.Tensor] = []
    objects: list[Any] = []
    shape = flatten(value, tensors, objects)
    hash(shape)
    again = rebuild(shape, tensors, objects)
    assert type(again) is type(value)
    second: list[torch.Tensor] = []
    assert flatten(again, second, []) == shape
    assert all(x is y for x, y in zip(tensors, second, strict=True))
    if isinstance(value, Output):
        assert again.loss is tensors[0]
        assert again[1:] == (tensors[1],)
    if isinstance(value, Encoding):
        assert again.origin == "here"
        assert again["input_ids"] is tensors[0]
        assert value.data.keys() == again.data.keys()


def test_shapes_tell_true_from_one() -> None:
    assert flatten((True,), [], []) != flatten((1,), [], [])


def body(model: Any, data: Any, factor: Any = None, *rest: Any, **named: Any) -> None: ...


def split(*args: Any, whole: Any = (), axes: Any = None, count: int = 2, **kwargs: Any) -> Any:
    return split_arguments(body, args, kwargs, count, whole, axes or {})


def test_tensors_are_divided_wherever_they_are() -> None:
    x = torch.arange(8)
    parts = split("model", {"x": [x, (x, 3)], "s": {x}}, 0.5, x, mask=Encoding({"m": x}, "y"))
    for number, (args, kwargs) in enumerate(parts):
        half = x[4 * number : 4 * number + 4]
        model, data, factor, extra = args
        assert (model, factor) == ("model", 0.5)
        assert torch.equal(data["x"][0], half)
        assert torch.equal(data["x"][1][0], half)
        assert data["x"][1][1] == 3
        assert torch.equal(next(iter(data["s"])), half)
        assert torch.equal(extra, half)
        assert torch.equal(kwargs["mask"]["m"], half)
        assert kwargs["mask"].origin == "y"


def test_arguments_reach_the_parameters_that_they_are_for() -> None:
    def several(a: Any, /, b: Any = 1, c: Any = 2, *rest: Any, d: Any = 3, **more: Any) -> Any:
        return a, b, c, rest, d, more

    for args, kwargs in (
        ((0,), {"c": 5}),
        ((0,), {"c": 5, "d": 6, "e": 7}),
        ((0, 4), {"d": 6}),
        ((0, 4, 5, 8, 9), {"e": 7}),
    ):
        for found in split_arguments(several, args, kwargs, 2, (), {}):
            assert several(*found[0], **found[1]) == several(*args, **kwargs)


def test_parts_are_independent_of_each_other() -> None:
    x, weight = torch.arange(8.0), torch.tensor(3.0, requires_grad=True)
    (_, first), (_, second) = (args for args, _ in split("m", x))
    squared = first * weight
    second.div_(2)  # not seen by what autograd has saved of the first part
    squared.sum().backward()
    first.mul_(weight).sum().backward()  # into memory that is the batch's, as in plain torch
    assert weight.grad == 2 * (0 + 1 + 2 + 3)
    assert x.tolist() == [0, 3, 6, 9, 2, 2.5, 3, 3.5]


def test_gradients_reach_a_batch_that_requires_them() -> None:
    x = torch.arange(4.0, requires_grad=True)
    for number, (args, _) in enumerate(split("m", x)):
        (args[1] * (number + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 2, 2]


def test_empty_tensors_are_divided_into_empty_ones() -> None:
    parts = split("m", torch.zeros(3, 0), axes={"data": 1}, count=3)
    assert [args[1].shape for args, _ in parts] == [(3, 0)] * 3


def test_exceptions_from_division() -> None:
    x = torch.arange(12).reshape(2, 6)
    scale = torch.tensor(2.0)
    sliced = Sliced([1, 2, 3, 4, 5, 6])
    parts = split("m", x, scale, sliced, whole=["factor"], axes={"data": 1}, count=3)
    for number, (args, _) in enumerate(parts):
        assert torch.equal(args[1], x[:, 2 * number : 2 * number + 2])
        assert args[2] is scale
        assert args[3].values == [2 * number + 1, 2 * number + 2]


class SlicedDict(dict):
    """A container of an unknown class, which slices itself."""

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> SlicedDict:
        return SlicedDict(part=(num_mb, mb, axis))


@dataclasses.dataclass
class SlicedRecord:
    part: Any

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> SlicedRecord:
        return SlicedRecord((num_mb, mb, axis))


def test_what_slices_itself_is_asked_wherever_it_is() -> None:
    record, mapping = SlicedRecord(torch.ones(3)), SlicedDict(a=torch.ones(5))
    both = [record, ({"x": mapping},)]
    for number, (args, _) in enumerate(split("m", record, mapping, both, axes={"rest": 1})):
        assert args[1].part == (2, number, 0)
        assert args[2]["part"] == (2, number, 0)
        assert args[3][0].part == args[3][1][0]["x"]["part"] == (2, number, 1)
    assert unequal_lengths(body, ("m", record, mapping, *both), {}, (), {}) == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"data": torch.zeros(5)}, "cannot be divided into 2 microbatches. Use drop_last=True"),
        ({"data": torch.tensor(1.0)}, "add 'data' to non_split_inputs"),
        ({"data": torch.zeros(4), "axes": {"data": 1}}, "no dimension 1"),
        ({"data": torch.zeros(4), "axes": {"date": 1}}, None),
    ],
)
def test_mistakes(arguments: dict[str, Any], text: str | None) -> None:
    data = arguments.pop("data")
    if text is None:

        def plain(model: Any, data: Any) -> None: ...

        with pytest.raises(SMPUsageError, match="no argument 'date'"):
            split_arguments(plain, ("m", data), {}, 2, (), arguments["axes"])
        return
    with pytest.raises(SMPUsageError, match=text):
        split("m", data, **arguments)


def test_names_are_a_list() -> None:
    with pytest.raises(SMPUsageError, match=r"non_split_inputs is a list of names: \['data'\]"):
        step(non_split_inputs="data")(body)


def test_lengths_are_told_only_where_they_differ() -> None:
    x, y = torch.zeros(4, 6), torch.zeros(6)
    model, scale = torch.nn.Linear(1, 1), torch.tensor(2.0)

    def told(*args: Any, whole: Any = (), axes: Any = None, **kwargs: Any) -> str:
        return unequal_lengths(body, args, kwargs, whole, axes or {})

    assert told(model, x, scale, x, 1.0, mask={"a": x}) == ""
    assert told(model, x, y, axes={"data": 1}) == told(model, x, y, whole=["factor"]) == ""
    # Each length of an argument is named once; arguments that are not divided are left out.
    assert told(model, [x, x, (y, None)], scale, x, mask=Encoding({"m": y}, "z")) == (
        "the arguments that smp.step divides differ in length: 'data' has 4 (dimension 0), 'data' "
        "has 6 (dimension 0), 'rest' has 4 (dimension 0), 'mask' has 6 (dimension 0)"
    )


def test_arguments_that_the_function_does_not_take() -> None:
    with pytest.raises(SMPUsageError, match=r"smp.step: body: missing a required argument: 'data'"):
        split("m")


def test_results_become_outputs_and_lists() -> None:
    results = [Output(loss=torch.tensor(float(n)), logits=torch.full((2, 3), n)) for n in range(4)]
    found = collect([(result, n, {"name": "x"}, [None]) for n, result in enumerate(results)], True)
    output, numbers, names, nothing = found
    assert type(output) is Output
    assert isinstance(output["loss"], StepOutput)
    assert output.loss.reduce_mean() == 1.5
    assert output.loss.average() == 1.5
    assert output.loss.reduce_sum() == 6
    assert output.loss.stack().tolist() == [0, 1, 2, 3]
    assert output[1].concat().shape == (8, 3)
    assert output[1].stack().shape == (4, 2, 3)
    assert numbers == [0, 1, 2, 3]
    assert names == {"name": ["x"] * 4}
    assert nothing == [[None] * 4]
    with pytest.raises(TypeError):
        iter(output.loss)


@pytest.mark.parametrize(
    ("values", "dtype", "total", "mean"),
    [
        ([True, True, False], torch.bool, 2, 2 / 3),
        ([200, 100, 3], torch.uint8, None, 101.0),
        ([40000.0, 40000.0], torch.float16, None, 40000.0),
        ([1.0, 2.0], torch.float64, 3.0, 1.5),
        ([1 + 1j, 1 - 1j], torch.complex64, 2, 1),
    ],
)
def test_sums_and_means_of_small_dtypes(
    values: list[Any], dtype: torch.dtype, total: Any, mean: Any
) -> None:
    output = StepOutput([torch.tensor([value, value], dtype=dtype) for value in values])
    assert output.reduce_mean().tolist() == pytest.approx([mean] * 2)
    if dtype.is_floating_point or dtype.is_complex:
        assert output.reduce_mean().dtype == dtype
    if total is not None:
        assert output.reduce_sum().tolist() == [total] * 2


def test_results_are_detached_if_asked() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not collect([x * 2], True).outputs[0].requires_grad
    assert collect([x * 2], False).outputs[0].requires_grad


def test_results_of_different_structure() -> None:
    with pytest.raises(SMPUsageError, match="different structures"):
        collect([(torch.zeros(1),), torch.zeros(1)], True)


def test_nothing_stays_nothing() -> None:
    assert collect([None, None], True) is None
