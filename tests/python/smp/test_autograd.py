"""What scripts do with autograd besides one backward pass per microbatch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import check_ranks
from smp.common import BY_HAND, Adjoint, gradients, shards, sums
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError

pytestmark = pytest.mark.multiprocess

WIDTH = 4


class Inner(nn.Module):
    """Calls a module of another rank from within a remote module."""

    def __init__(self, pp: int) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        with smp.partition(0):
            self.nested = nn.Linear(WIDTH, WIDTH)
        with smp.partition(pp - 1):
            self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Has a skip connection around the nested module."""
        x = torch.tanh(self.before(x))
        return self.last(x + torch.tanh(self.nested(x)))


class Net(nn.Module):
    """The first part on rank 0, the second on rank 1, which calls rank 0 and the last rank."""

    def __init__(self, pp: int) -> None:
        super().__init__()
        with smp.partition(0):
            self.first = nn.Linear(WIDTH, WIDTH)
        with smp.partition(min(1, pp - 1)):
            self.inner = Inner(pp)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.first(x))).square().sum(1)


def saliency(model: Any, x: Tensor, y: Tensor) -> Any:
    """Gradients of the input only."""
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(F.mse_loss(model(x), y), x)
    return found


def adversarial(model: Any, x: Tensor, y: Tensor) -> Any:
    """Trains on inputs that are moved along their gradient."""
    moved = x + 0.1 * saliency(model, x, y).sign()
    loss = F.mse_loss(model(moved), y)
    model.backward(loss)
    return loss.detach()


def kept(model: Any, x: Tensor, y: Tensor) -> Any:
    """Both from one forward pass."""
    x = x.clone().requires_grad_()
    loss = F.mse_loss(model(x), y)
    (found,) = torch.autograd.grad(loss, x, retain_graph=True)
    model.backward(loss)
    return found


def kept_in_vain(model: Any, x: Tensor, y: Tensor) -> Any:
    """A graph is kept for a pass that never comes; only half of the input is asked for."""
    left, right = (half.clone().requires_grad_() for half in x.chunk(2, 1))
    loss = F.mse_loss(model(torch.cat([left, right], 1)), y)
    torch.autograd.grad(loss, right, retain_graph=True)
    return torch.autograd.grad(loss, left, retain_graph=True)[0]


def twice(model: Any, x: Tensor, y: Tensor) -> Any:
    """Two backward passes through one graph add up."""
    loss = F.mse_loss(model(x), y)
    loss.backward(retain_graph=True)
    model.backward(2 * loss)
    return loss.detach()


def chosen(model: Any, x: Tensor, y: Tensor) -> Any:
    """Only the given leaf gets a gradient."""
    x = x.clone().requires_grad_()
    F.mse_loss(model(x), y).backward(inputs=[x])
    return x.grad


def penalty(model: Any, x: Tensor, y: Tensor) -> Any:
    """Trains with the square of a gradient."""
    x = x.clone().requires_grad_()
    found = model(x)
    (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    loss = F.mse_loss(found, y) + slope.square().mean()
    model.backward(loss)
    return loss.detach()


def curvature(model: Any, x: Tensor, y: Tensor) -> Any:
    """Trains with derivatives only, up to the third one; some are asked for by their inputs."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second[:, 1].sum(), x, create_graph=True)
    loss = (second.square() + third).mean()
    model.backward(loss)
    return loss.detach()


def functional(model: Any, x: Tensor, y: Tensor) -> Any:
    """Products with Jacobians and Hessians, made by two backward passes each."""
    of = torch.autograd.functional
    v = torch.linspace(-1, 1, x.numel()).view_as(x)

    def loss(x: Tensor) -> Tensor:
        return F.mse_loss(model(x), y)

    found = [of.jvp(model, x, v)[1], of.jvp(model, x, v, create_graph=True)[1]]
    found += [of.hvp(loss, x, v)[1], of.vhp(loss, x, v)[1], of.hessian(loss, x)]
    found += [of.jacobian(model, x), of.jacobian(model, x, create_graph=True)]
    return torch.stack([one.detach().mul(1 + one.numel()).square().sum() for one in found])


def of_parameters(model: Any, x: Tensor, y: Tensor) -> Any:
    """Gradients of all parameters, as values."""
    loss = F.mse_loss(model(x), y)
    found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(model.parameters())[::-1])
    torch.testing.assert_close(found, again[::-1], rtol=0, atol=0)
    return torch.stack([one.norm() for one in found])


def sharpness(model: Any, x: Tensor, y: Tensor) -> Any:
    """Trains with the norms of the gradients of some parameters."""
    loss = F.mse_loss(model(x), y)
    some = list(model.parameters())[1::2]
    found = torch.autograd.grad(loss, some, create_graph=True)
    total = loss + sum(one.square().sum() for one in found)
    model.backward(total)
    return torch.stack([one.detach().norm() for one in found])


def unused_graph(model: Any, x: Tensor, y: Tensor) -> Any:
    """A graph of the gradients that nobody needs."""
    x = x.clone().requires_grad_()
    loss = F.mse_loss(model(x), y)
    loss.backward(create_graph=True)
    return x.grad.detach()  # type: ignore[union-attr]


BODIES = [saliency, adversarial, kept, kept_in_vain, twice, chosen]
TWICE = [penalty, curvature, functional, of_parameters, sharpness, unused_graph]


def run(pp: int, pipeline: str, active: int, names: str) -> Any:
    """Returns what each body returns, and the gradients that it leaves."""
    options = {"pipeline": pipeline, "active_microbatches": active}
    smp.init({**BY_HAND, "partitions": pp, "microbatches": 4, **options})
    torch.manual_seed(0)
    module = Net(pp)
    model = smp.DistributedModel(module)
    x, y = torch.randn(8, WIDTH), torch.randn(8)
    found = {}
    for body in globals()[names]:

        @smp.step
        def step(model: Any, x: Tensor, y: Tensor, body: Any = body) -> Any:
            return body(model, x, y)

        for _ in range(3):
            for parameter in model.local_parameters() if model.partitioned else ():
                parameter.grad = None
            result = step(model, x, y)
        assert not model.runtime.executor.server._runs
        found[body.__name__] = (
            torch.stack([one.sum() for one in result.outputs]),
            gradients(model),
        )
    return found


def check_bodies(pipeline: str, active: int, names: str) -> Any:
    """Compares two and three partitions with one; returns what that one has found."""
    (expected,) = check_ranks(run, "1", 1, pipeline, active, names)
    for pp in (2, 3):
        for rank in check_ranks(run, str(pp), pp, pipeline, active, names):
            for body, (result, grads) in rank.items():
                wanted, of_all = expected[body]
                torch.testing.assert_close(
                    (result, grads),
                    (wanted, {name: of_all[name] for name in grads}),
                    msg=lambda m, where=f"{body}, {pp} ranks": f"{where}: {m}",
                )
    return expected


@pytest.mark.parametrize(
    ("pipeline", "active"), [("interleaved", 1), ("interleaved", 4), ("simple", 4)]
)
def test_only_what_is_asked_for_gets_gradients(pipeline: str, active: int) -> None:
    expected = check_bodies(pipeline, active, "BODIES")
    for body in ("saliency", "kept_in_vain", "chosen"):
        assert all(gradient is None for gradient in expected[body][1].values())


@pytest.mark.parametrize(
    ("pipeline", "active"),
    [pytest.param("interleaved", 4, marks=pytest.mark.costly), ("simple", 4)],
)
def test_derivatives_of_derivatives_and_of_parameters(pipeline: str, active: int) -> None:
    check_bodies(pipeline, active, "TWICE")


def asked(pp: int) -> Any:
    """Asks for the gradients of some parameters."""
    smp.init({"partitions": pp, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)
    module = Net(pp)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, x: Tensor, names: list[str]) -> Any:
        inputs = [module.get_parameter(name) for name in names]
        loss = model(x).sum()
        loss.backward(inputs=inputs)

    def found() -> dict[str, Any]:
        return {name: p.grad for name, p in model.local_named_parameters() if p.grad is not None}

    x = torch.randn(4, WIDTH)
    step(model, x, ["first.weight"])
    local = found()
    texts = []
    if pp > 1:
        for names in (["inner.last.weight"], ["first.bias", "inner.before.bias"]):
            with pytest.raises(SMPMicrobatchError) as caught:
                step(model, x, names)
            texts.append(str(caught.value))
    return local, texts


def test_gradients_of_chosen_parameters_are_those_of_this_rank_or_refused() -> None:
    (expected,) = check_ranks(asked, "1", 1)
    for rank, (local, texts) in enumerate(check_ranks(asked, "2", 2)):
        torch.testing.assert_close(local, expected[0] if rank == 0 else {})
        for name, text in zip(("inner.last.weight", "inner.before.bias"), texts, strict=True):
            assert f"SMPUsageError: backward(inputs=…) cannot reach parameter {name!r}" in text
            assert "lives on rank 1 of the pipeline: call model.backward(loss)" in text


class Severed(nn.Module):
    """Its second part gives the first one no gradient for some data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(1, 2, WIDTH * WIDTH).view(WIDTH, WIDTH))
        self.second = Severs()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x @ self.first)  # type: ignore[no-any-return]


class Severs(nn.Module):
    """Detaches its input if that is positive; another function gives no gradient if it is large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        total = float(x.detach().sum())
        x = x.detach() if total > 0 else x
        return (NoGradient.apply(x) if total < -99 else x) @ self.weight  # type: ignore[no-any-return]


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


# What each microbatch of a step is filled with: two steps in which all give gradients, then some.
SIGNS = [(-1, -2), (-1, -2), (-1, 1), (1, -1), (-99, -1), (1, -99), (1, 2), (-2, -99)]


def severed(partitions: int, degree: int) -> Any:
    config = {"microbatches": 2, "ddp": degree > 1, **shards(degree)}
    smp.init({**BY_HAND, "partitions": partitions, **config})
    module = Severed()
    model = smp.DistributedModel(module)
    smp.set_partition(module.second, partitions - 1)

    found = []
    for signs in SIGNS:
        for parameter in module.parameters():
            parameter.grad = None
        sums(
            model,
            torch.tensor(signs, dtype=torch.float32)
            .repeat_interleave(2)[:, None]
            .expand(-1, WIDTH),
        )
        found.append({name: p.grad for name, p in model.local_named_parameters()})
    return found


@pytest.mark.parametrize(
    ("partitions", "degree"), [(2, 1), (1, 2), (2, 2)], ids=["parts", "shards", "both"]
)
def test_a_parameter_whose_use_gets_no_gradient(partitions: int, degree: int) -> None:
    whole = Severed()
    expected: list[dict[str, Any]] = []
    for signs in SIGNS:
        whole.zero_grad()
        for sign in signs:
            (whole(torch.full((2, WIDTH), float(sign))).sum() / 2).backward()
        expected.append({name: p.grad for name, p in whole.named_parameters()})
    assert [one["first"] is None for one in expected] == [False] * 5 + [True, True, False]
    for rank, steps in enumerate(
        check_ranks(severed, str(partitions * degree), partitions, degree)
    ):
        for step, found in enumerate(steps):
            wanted = {name: expected[step][name] for name in found}
            for name, gradient in wanted.items() if degree > 1 else ():
                if gradient is not None:
                    wanted[name] = gradient.view(degree, -1)[rank // partitions]
            where = f"step {step}, rank {rank}"
            torch.testing.assert_close(found, wanted, msg=lambda m, at=where: f"{at}: {m}")


class Box:
    """An object of a class that smp does not know."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Packs(nn.Module):
    """Passes tensors inside other values, of the kind that `way` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = Unpacks(way)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.way == "argument":
            h = Box(h)
        elif self.way == "torch's argument":
            h = torch.return_types.max((h, h.long()))
        elif self.way == "parameter":
            h = Box(self.first.weight)
        y = self.second(h, Box(h)) if self.way == "not needed" else self.second(h)
        if self.way == "result":
            return y.value  # type: ignore[no-any-return]
        return y.values if self.way == "torch's result" else y  # type: ignore[no-any-return]


class Unpacks(nn.Module):
    """Is on another rank than `Packs`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, more: Any = None) -> Any:
        if self.way in ("argument", "parameter"):
            x = x.value
        if self.way == "torch's argument":
            assert isinstance(x, torch.return_types.max)
            x = x.values
        y = self.second(x)
        if self.way == "result":
            return Box(y)
        return y.max(dim=1) if self.way == "torch's result" else y


def packed(partitions: int, way: str) -> Any:
    """Returns the gradients of three steps."""
    smp.init({**BY_HAND, "partitions": partitions, "microbatches": 2})
    torch.manual_seed(0)
    module = Packs(way)
    model = smp.DistributedModel(module)
    smp.set_partition(module.second, partitions - 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        model.backward(model(x).square().sum())

    found = []
    for _ in range(3):
        model.zero_grad()
        step(model, torch.randn(4, WIDTH))
        found.append({name: p.grad for name, p in model.local_named_parameters()})
    return found


@pytest.mark.parametrize(
    "way", ["torch's argument", "torch's result", "not needed", "argument", "result", "parameter"]
)
def test_gradients_of_tensors_inside_other_values(way: str) -> None:
    (alone,) = check_ranks(packed, "1", 1, way)
    one, two = check_ranks(packed, "2", 2, way)
    for step, expected in enumerate(alone):
        torch.testing.assert_close({**one[step], **two[step]}, expected)


class Reversible(torch.autograd.Function):
    """Computes its input again from its output, and lets parameters get their gradients there."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            left, right = x.chunk(2, 1)
            right = right + f(left)
        ctx.f = f
        ctx.save_for_backward(torch.cat([left, right], 1))
        return torch.cat([left, right], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        left, right = y.chunk(2, 1)
        with torch.enable_grad():
            left = left.detach().requires_grad_()
            of_left, of_right = gradient.chunk(2, 1)
            with torch.no_grad():
                torch.testing.assert_close(right - ctx.f(left), right - ctx.f(left))
            ctx.f(left).backward(of_right)
        return None, torch.cat([of_left + left.grad, of_right], 1)


class Solver(nn.Module):
    """Uses functions that call modules of several ranks in their backward passes."""

    def __init__(self, pp: int) -> None:
        super().__init__()
        with smp.partition(0):
            self.first = nn.Linear(WIDTH, WIDTH)
        with smp.partition(pp - 1):
            self.f = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            with smp.partition(0):
                self.f.append(nn.Linear(WIDTH, WIDTH))
            self.turn = nn.Sequential(nn.Linear(WIDTH // 2, WIDTH // 2), nn.Tanh())
            with smp.partition(min(1, pp - 1)):
                self.turn.append(nn.Linear(WIDTH // 2, WIDTH // 2))

    def solved(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = Adjoint.apply(lambda x: x + self.f(x), x, *self.f.parameters())
        return Reversible.apply(self.turn, x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, checkpointed: bool = False) -> Tensor:
        x = self.first(x)
        if checkpointed:
            x = checkpoint(self.solved, x, use_reentrant=False)
        return self.solved(x) + self.f(x)


class Around(nn.Module):
    """Has the solver on another rank than the body."""

    def __init__(self, pp: int) -> None:
        super().__init__()
        with smp.partition(0):
            self.outer = nn.Linear(WIDTH, WIDTH)
        with smp.partition(min(1, pp - 1)):
            self.solver = Solver(pp)

    def forward(self, x: Tensor, checkpointed: bool = False) -> Tensor:
        return self.solver(self.outer(x), checkpointed)  # type: ignore[no-any-return]


def solved(pp: int, kind: type[Any], checkpointed: bool, marked: bool = False) -> Any:
    smp.init({**BY_HAND, "partitions": pp, "microbatches": 4, "ddp": True})
    torch.manual_seed(0)
    module = kind(pp)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        loss = model(x, checkpointed).square().mean()
        model.backward(loss)
        return loss.detach()

    x = torch.randn(8, WIDTH)
    found = []
    for number in range(3):
        if number == 1 and marked:
            smp.set_activation_checkpointing(module.turn[0])
            smp.set_activation_checkpointing(module.f[0])
        module.zero_grad()
        loss = step(model, x).reduce_mean()
        found.append((loss, {n: g for n, g in gradients(model).items() if g is not None}))
    return found


@pytest.mark.parametrize("kind", [Solver, Around])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_function_that_calls_modules_in_its_backward(kind: Any, checkpointed: bool) -> None:
    (expected,) = check_ranks(solved, "1", 1, kind, checkpointed)
    for pp in (2, 3):
        ranks = check_ranks(solved, str(pp), pp, kind, checkpointed, kind is Solver)
        for step, (loss, grads) in enumerate(expected):
            torch.testing.assert_close(ranks[-1][step][0], loss)
            found = {name: one for rank in ranks for name, one in rank[step][1].items()}
            where = f"step {step}, {pp} ranks"
            torch.testing.assert_close(found, grads, msg=lambda m, w=where: f"{w}: {m}")


def later() -> Any:
    """Differentiates twice only in a later step, whose calls are sent together at first."""
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    module = nn.Sequential(layers[0], nn.Tanh(), *layers[1:3], nn.Tanh(), layers[3])
    model = smp.DistributedModel(module)
    for number in (2, 3):
        smp.set_partition(module[number], 1)
    x = torch.randn(4, WIDTH)
    runs = 0

    @smp.step
    def step(model: Any, x: Tensor, twice: bool) -> Any:
        nonlocal runs
        runs += 1
        x = x.clone().requires_grad_()
        loss = model(x).square().sum()
        if twice:
            loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        model.backward(loss)
        return loss.detach()

    found = []
    for twice in (False, False, True, True):
        found.append(step(model, x, twice).reduce_mean())
    x = x.clone().requires_grad_()
    return found, runs


def test_the_first_step_that_differentiates_twice_is_run_again() -> None:
    losses, runs = check_ranks(later, "2")[0]
    assert runs == 4 * 2 + 2 - (runs == 9)  # the first microbatch may end the attempt
    torch.testing.assert_close(losses[2], losses[3])
    assert losses[2] > losses[1]


def transformed(how: str) -> str:
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    model = smp.DistributedModel(Net(2))

    def total(x: Tensor) -> Tensor:
        return model(x).sum()  # type: ignore[no-any-return]

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        model(x)
        v = torch.ones_like(x)
        if how == "func.grad":
            return torch.func.grad(total)(x)
        if how == "func.jvp":
            return torch.func.jvp(model, (x,), (v,))[1]
        if how == "func.hessian":
            return torch.func.hessian(total)(x)
        if how == "vmap":
            return torch.vmap(model)(x[:, None])
        if how == "vectorize":
            return torch.autograd.functional.jacobian(model, x, vectorize=True)
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(
                model(torch.autograd.forward_ad.make_dual(x, v))
            ).tangent

    with pytest.raises(SMPMicrobatchError) as caught:
        step(model, torch.ones(4, WIDTH))
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("func.grad", "a transform of torch.func"),
        ("func.jvp", "a transform of torch.func"),
        ("func.hessian", "a transform of torch.func"),
        ("vmap", "a transform of torch.func"),
        ("vectorize", "a batch of gradients"),
        ("dual", "a tensor with a tangent"),
    ],
)
def test_what_messages_cannot_carry_is_refused(how: str, what: str) -> None:
    for text in check_ranks(transformed, "2", how):
        assert f"SMPUsageError: {what}" in text
        assert "cannot go through calls of modules on another rank: 'inner'" in text
        assert "smp.set_partition(module, 0)" in text


class Borrower(nn.Module):
    """Uses the weights of modules that are not registered in it, and calls one of them."""

    def __init__(self, lender: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.lenders = [lender]
        self.weight_of = {"other": other.weight}

    def forward(self, x: Tensor) -> Tensor:
        x = self.lenders[0](x) @ self.weight_of["other"]
        return self.scale * x * self.lenders[0].bias  # type: ignore[no-any-return]


class Lending(nn.Module):
    """Each part on a rank of its choice."""

    def __init__(self, places: tuple[int, int, int]) -> None:
        super().__init__()
        with smp.partition(places[0]):
            self.lender = nn.Linear(WIDTH, WIDTH)
        with smp.partition(places[1]):
            self.other = nn.Linear(WIDTH, WIDTH)
        with smp.partition(places[2]):
            self.borrower = Borrower(self.lender, self.other)

    def forward(self, x: Tensor) -> Tensor:
        return self.borrower(x).square().sum(1)  # type: ignore[no-any-return]


def borrowed(pp: int, places: tuple[int, int, int], allow_unused: bool) -> Any:
    smp.init({"partitions": pp, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)
    module = Lending(places)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        used = [p for name, p in model.named_parameters() if not name.endswith("other.bias")]
        found = torch.autograd.grad(model(x).sum(), used, allow_unused=allow_unused)
        return torch.stack([torch.tensor(-1.0) if one is None else one.norm() for one in found])

    x = torch.randn(4, WIDTH)
    return [step(model, x).outputs for _ in range(3)]


@pytest.mark.parametrize("allow_unused", [False, True])
def test_gradients_of_parameters_that_another_module_refers_to(allow_unused: bool) -> None:
    (expected,) = check_ranks(borrowed, "1", 1, (0, 0, 0), allow_unused)
    for places in ((1, 1, 1), (0, 1, 1), (1, 0, 1)):
        for found in check_ranks(borrowed, "2", 2, places, allow_unused):
            torch.testing.assert_close(found, expected)


class Unusual(nn.Module):
    """Is asked for the names of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, *, scale: float = 1.0, **others: Any) -> Tensor:
        return x * self.weight * scale


def signatures() -> list[str]:
    smp.init({"partitions": 2, "auto_partition": False, "default_partition": 0})
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Unusual())
    model = smp.DistributedModel(module)
    smp.set_partition(module[1], 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        return model(x).sum()

    step(model, torch.ones(2, WIDTH))
    return [str(inspect.signature(one.forward)) for one in module]


def test_code_finds_which_arguments_a_module_of_another_rank_takes() -> None:
    wanted = [str(inspect.signature(one.forward)) for one in (nn.Linear(1, 1), Unusual())]
    for found in check_ranks(signatures, "2"):
        assert found == wanted
