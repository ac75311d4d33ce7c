"""Exchanges of tensor parallelism, against the same arithmetic on the tensors of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import check_ranks
from smp.zoo import device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from smddp.modelparallel.torch.job.collectives import Collectives
from smddp.modelparallel.torch.tensor.exchange import Exchange, SequenceExchange

pytestmark = pytest.mark.multiprocess
METHODS = ["gather", "reduce", "divide", "unite"]
B, H = 3, 4


def inputs(method: str, size: int, prescaled: bool) -> list[Tensor]:
    """Returns the argument of each rank."""
    batch = B * (size if method in ("reduce", "unite") and not prescaled else 1)
    features = H if method == "unite" else H * size
    source = torch.Generator().manual_seed(1)
    shape = (batch, 2, features)
    if prescaled and method in ("gather", "divide"):
        x = torch.randn(shape, generator=source, dtype=torch.float64)
        return [x.clone().requires_grad_() for _ in range(size)]
    return [
        torch.randn(shape, generator=source, dtype=torch.float64).requires_grad_()
        for _ in range(size)
    ]


def expected(method: str, xs: list[Tensor], prescaled: bool) -> list[Tensor]:
    """Computes every rank's result in one process."""
    size, ranks = len(xs), range(len(xs))
    if prescaled:
        return {
            # Each use of the one tensor adds to its gradient.
            "gather": lambda: [sum(xs[1:], xs[0]) / size for _ in ranks],
            "reduce": lambda: [sum(xs[1:], xs[0]) for _ in ranks],
            "divide": lambda: [(sum(xs[1:], xs[0]) / size).chunk(size, -1)[r] for r in ranks],
            "unite": lambda: [torch.cat(xs, -1) for _ in ranks],
        }[method]()
    if method == "gather":
        return [torch.cat(xs) for _ in ranks]
    if method == "reduce":
        return list(sum(xs[1:], xs[0]).chunk(size))
    if method == "divide":
        return [torch.cat(xs).chunk(size, -1)[r] for r in ranks]
    return [torch.cat([x.chunk(size)[r] for x in xs], -1) for r in ranks]


def weights(shape: torch.Size, rank: int) -> Tensor:
    source = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=source, dtype=torch.float64)


def exchanged() -> Any:
    dist.init_process_group("smddp")
    world = dist.group.WORLD
    assert world is not None
    results = {}
    for prescaled in (False, True):
        exchange = Exchange(Collectives(world), prescaled)
        for method in METHODS:
            x = inputs(method, exchange.size, prescaled)[exchange.rank].detach().to(device())
            x.requires_grad_()
            result = getattr(exchange, method)(x)
            same = prescaled and method in ("reduce", "unite")  # all ranks compute one loss
            scale = weights(result.shape, 0 if same else exchange.rank).to(device())
            (result * scale).sum().backward()
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = getattr(exchange, method)(mode.from_tensor(x))
                assert fake.shape == result.shape
            results[method, prescaled] = result.detach().cpu(), x.grad.cpu()
        assert exchange.maximum(torch.tensor([exchange.rank, -exchange.rank])).tolist() == [
            exchange.size - 1,
            0,
        ]
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values_and_gradients(size: int) -> None:
    ranks = check_ranks(exchanged, str(size))
    for prescaled in (False, True):
        for method in METHODS:
            xs = inputs(method, size, prescaled)
            results = expected(method, xs, prescaled)
            same = prescaled and method in ("reduce", "unite")
            # With one loss for all ranks, one of the equal results counts.
            losses = [(y * weights(y.shape, r)).sum() for r, y in enumerate(results)]
            sum(losses[:1] if same else losses).backward()  # type: ignore[union-attr]
            for rank, found in enumerate(ranks):
                value, gradient = found[method, prescaled]
                torch.testing.assert_close(value, results[rank].detach())
                grad = xs[rank].grad
                assert grad is not None
                if prescaled and method in ("gather", "divide"):
                    grad = grad * size  # the gradient of the one tensor that all have
                torch.testing.assert_close(gradient, grad, msg=f"{method} {prescaled} {rank}")


# Before `shorten` and `replicas` all ranks have the same tensor. What `lengthen` returns is used
# alike on all ranks.
OF_SEQUENCES = ["gather", "reduce", "shorten", "lengthen", "replicas"]


def sequences(method: str, size: int) -> list[Tensor]:
    """Returns the argument of each rank, of which the second dimension is that of positions."""
    source = torch.Generator().manual_seed(1)
    shape = (B, 2 if method in ("gather", "lengthen") else 2 * size, H)
    first, *others = (
        torch.randn(shape, generator=source, dtype=torch.float64).requires_grad_()
        for _ in range(size)
    )
    return [first] * size if method in ("shorten", "replicas") else [first, *others]


def expected_of_sequences(method: str, xs: list[Tensor]) -> list[Tensor]:
    """Computes every rank's result in one process."""
    size = len(xs)
    return {
        "gather": lambda: [torch.cat(xs, 1)] * size,
        "reduce": lambda: list(sum(xs[1:], xs[0]).chunk(size, 1)),
        "shorten": lambda: list(xs[0].chunk(size, 1)),
        "lengthen": lambda: [torch.cat(xs, 1)] * size,
        "replicas": lambda: xs,
    }[method]()


def exchanged_sequences() -> Any:
    dist.init_process_group("smddp")
    world = dist.group.WORLD
    assert world is not None
    exchange = SequenceExchange(Collectives(world))
    results = {}
    for method in OF_SEQUENCES:
        x = sequences(method, exchange.size)[exchange.rank].detach().to(device()).requires_grad_()

        def result_of(x: Tensor, method: str = method) -> Tensor:
            found = getattr(exchange, method)(x)
            return found[0] if method == "replicas" else found

        result = result_of(x)
        scale = weights(result.shape, 0 if method == "lengthen" else exchange.rank).to(device())
        (result * scale).sum().backward()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert result_of(mode.from_tensor(x)).shape == result.shape
        results[method] = result.detach().cpu(), x.grad.cpu()
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values_and_gradients_of_parts_of_sequences(size: int) -> None:
    ranks = check_ranks(exchanged_sequences, str(size))
    for method in OF_SEQUENCES:
        xs = sequences(method, size)
        results = expected_of_sequences(method, xs)
        losses = [(y * weights(y.shape, r)).sum() for r, y in enumerate(results)]
        sum(losses[:1] if method == "lengthen" else losses).backward()  # type: ignore[union-attr]
        for rank, found in enumerate(ranks):
            value, gradient = found[method]
            torch.testing.assert_close(value, results[rank].detach())
            torch.testing.assert_close(gradient, xs[rank].grad, msg=f"{method} {rank}")
