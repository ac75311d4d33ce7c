"""Models that are hard to divide, with batches and losses; trained whole, they are the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # takes seconds; the first optimizer would import it, in each rank
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp

BATCH = 8


def device() -> torch.device:
    """Returns the device that smp trains on: a GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Fault(nn.Module):
    """Fails on its rank if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise ZeroDivisionError("in forward")
        if self.when == "backward":
            x = x * 1
            x.register_hook(self._fail)
        return x

    def _fail(self, gradient: Tensor) -> None:
        raise ZeroDivisionError("in backward")


@dataclasses.dataclass
class Entry:
    """One model of the zoo.

    Attributes:
        make: returns the model.
        batch: returns the tensors of a batch for a generator.
        loss: of the model's output and the batch.
        exact: is every sum made in the order in which one process makes it?
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    exact: bool = True


def _classes(generator: torch.Generator, *shape: int) -> tuple[Tensor, ...]:
    x = torch.randn(BATCH, *shape, generator=generator)
    return x, torch.randint(0, 4, (BATCH,), generator=generator)


def _tokens(generator: torch.Generator) -> tuple[Tensor, ...]:
    ids = torch.randint(0, 30, (BATCH, 6), generator=generator)
    return ids, ids.roll(-1, 1)


def _cross_entropy(output: Tensor, *batch: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), batch[-1].reshape(-1))


class Residual(nn.Module):
    """Convolutions with batch norm, ReLU in place, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + x)


class UNet(nn.Module):
    """Skip connections from every level of the encoder to the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 8, 3, padding=1)])
        self.middle = nn.Conv1d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv1d(16, 4, 3, padding=1), nn.Conv1d(8, 4, 3, padding=1)])
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
            x = F.avg_pool1d(x, 2)
        x = self.middle(x)
        for layer in self.up:
            x = torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1)
            x = torch.relu(layer(x))
        return self.head(x.mean(-1))


class Block(nn.Module):
    """A transformer layer that returns a tuple, like those of model libraries."""

    def __init__(self, width: int, cross: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(width, 2, batch_first=True) if cross else None
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None) -> Any:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        if self.cross is not None:
            x = x + self.cross(x, memory, memory, need_weights=False)[0]
        return x + self.mlp(self.norm2(x)), None


class TiedGPT(nn.Module):
    """The output layer shares its weight with the embedding, which the model uses directly."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 16)
        self.positions = nn.Embedding(6, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(4)])
        self.norm = nn.LayerNorm(16)
        mask = torch.full((6, 6), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, mask=self.mask)[0]
        return F.linear(self.norm(x), self.tokens.weight)


class EncoderDecoder(nn.Module):
    """Every layer of the decoder attends to the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.encoder = nn.ModuleList([Block(16) for _ in range(2)])
        self.decoder = nn.ModuleList([Block(16, cross=True) for _ in range(2)])
        self.head = nn.Linear(16, 30)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embedding(source)
        for layer in self.encoder:
            memory = layer(memory)[0]
        x = self.embedding(target)
        for layer in self.decoder:
            x = layer(x, memory=memory)[0]
        return self.head(x)


class MixtureOfExperts(nn.Module):
    """Which experts run depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)]
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        scores = self.gate(x).softmax(-1)
        choice = scores.argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            if len(rows):
                weighted = expert(x[rows]) * scores[rows, number].unsqueeze(-1)
                y = y.index_add(0, rows, weighted)
        return self.head(x + y)


class Recursive(nn.Module):
    """Calls the same cell along a binary tree, by recursion."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Linear(2, 8)
        self.cell = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)

    def tree(self, x: Tensor) -> Tensor:
        if x.shape[1] == 2:
            return self.leaf(x)
        left, right = x.chunk(2, 1)
        return self.cell(torch.cat([self.tree(left), self.tree(right)], 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tree(x))


class Siamese(nn.Module):
    """One part is used for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.compare = nn.Bilinear(8, 8, 4)

    def forward(self, pair: Tensor) -> Tensor:
        one, two = pair.unbind(1)
        return self.compare(self.tower(one), self.tower(two))


class Recurrent(nn.Module):
    """An LSTM's state goes from one module to another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.encoder = nn.LSTM(8, 8, batch_first=True)
        self.decoder = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x, memory = self.encoder(self.embedding(ids))
        y, _ = self.decoder(x, memory)
        return self.head(y)


class Recommender(nn.Module):
    """Embedding tables beside a dense part; arguments and results in a dict."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user = nn.Embedding(20, 8)
            self.item = nn.Embedding(30, 8)

        def forward(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"user": self.user(ids["user"]), "item": self.item(ids["item"])}

    def __init__(self) -> None:
        super().__init__()
        self.tables = Recommender.Tables()
        self.dense = nn.Linear(8, 8)
        self.top = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        ids = {"user": x[:, 0].abs().long() % 20, "item": (x[:, 1] * 9).abs().long() % 30}
        found = self.tables(ids)
        return self.top(found["user"] * found["item"] + self.dense(x))


@dataclasses.dataclass
class Encoded:
    """A result with names."""

    hidden: Tensor
    pooled: Tensor | None = None


class VisionTransformer(nn.Module):
    """Patches, nested containers, a class token that is a parameter of the root."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                *[nn.TransformerEncoderLayer(8, 2, 16, 0.0) for _ in range(3)]
            )
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor, pool: bool = True) -> Encoded:
            x = self.norm(self.layers(x))
            return Encoded(x, x[:, 0] if pool else None)

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.patches = nn.Conv2d(1, 8, 2, stride=2)
        self.encoder = VisionTransformer.Encoder()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(self.encoder(x, pool=True).pooled)


class Parametrized(nn.Module):
    """Weights computed from others, a hook on a module, a parameter passed as an argument."""

    class Project(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return F.linear(x, weight, self.bias)

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
        self.hooked = nn.Linear(16, 8)
        self.hooked.register_forward_hook(lambda module, args, result: result * 2.0)
        self.weight = nn.Parameter(torch.randn(4, 8) / 3)
        self.project = Parametrized.Project()

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.tanh(self.hooked(self.normed(x))), self.weight)


class Frozen(nn.Module):
    """A part without gradients in the middle, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.fixed = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.fixed.requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        self.features = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.features(x)
        return self.last(self.fixed(self.first(x)) + features)


class LooseEnds(nn.Module):
    """Arguments that a module does not use; results that are unused or do not reach the loss."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.extra = nn.Linear(8, 3)

        def forward(self, x: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.linear(x)), self.extra(x)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([LooseEnds.Part() for _ in range(3)])
        self.dropped = nn.Linear(8, 2)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        auxiliary = x
        for part in self.parts:
            self.dropped(x)
            x, auxiliary = part(x, auxiliary.detach())
        return self.last(x)


class Checkpointed(nn.Module):
    """Activations are computed again in the backward pass, by both variants of torch.

    Checkpoints are around single layers, around several that live apart, and of a layer's output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(5)]
        )
        self.last = nn.Linear(8, 4)

    def inner(self, x: Tensor) -> Tensor:
        return self.layers[4](self.layers[3](x) + x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.first(x))
        x = checkpoint(self.layers[1], x, use_reentrant=True)
        x = checkpoint(self.layers[2], x, use_reentrant=False)
        x = checkpoint(self.inner, x, use_reentrant=True)
        return self.last(checkpoint(self.inner, x, use_reentrant=False))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16),
        nn.ReLU(inplace=True), nn.Linear(16, 4),
    )  # fmt: skip


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), Residual(4), Residual(4), Residual(4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip


def _shared() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(
        layer, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 4)
    )


def _pairs(generator: torch.Generator) -> tuple[Tensor, ...]:
    return _classes(generator, 2, 8)


def _images(generator: torch.Generator) -> tuple[Tensor, ...]:
    return _classes(generator, 1, 8, 8)


def _vectors(generator: torch.Generator) -> tuple[Tensor, ...]:
    return _classes(generator, 8)


ZOO: dict[str, Entry] = {
    "mlp": Entry(_mlp, _vectors, _cross_entropy),
    "resnet": Entry(_resnet, _images, _cross_entropy),
    "unet": Entry(UNet, lambda g: _classes(g, 1, 16), _cross_entropy),
    "tied gpt": Entry(TiedGPT, _tokens, _cross_entropy),
    "encoder-decoder": Entry(EncoderDecoder, _tokens, _cross_entropy),
    "mixture of experts": Entry(MixtureOfExperts, _vectors, _cross_entropy),
    # Autograd adds several uses of one microbatch in another order.
    "recursive": Entry(Recursive, _vectors, _cross_entropy, exact=False),
    "siamese": Entry(Siamese, _pairs, _cross_entropy),
    "recurrent": Entry(Recurrent, _tokens, _cross_entropy),
    "recommender": Entry(Recommender, _vectors, _cross_entropy),
    "vision transformer": Entry(VisionTransformer, _images, _cross_entropy),
    "parametrized": Entry(Parametrized, _vectors, _cross_entropy),
    "frozen": Entry(Frozen, _vectors, _cross_entropy),
    "loose ends": Entry(LooseEnds, _vectors, _cross_entropy),
    "checkpointed": Entry(Checkpointed, _vectors, _cross_entropy, exact=False),
    "shared layer": Entry(_shared, _vectors, _cross_entropy),
}


def arguments(entry: Entry, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the part of a batch that is passed to the model."""
    return batch if entry.make is EncoderDecoder else batch[:1]


def make(name: str) -> nn.Module:
    """Returns a model whose weights are the same on all ranks."""
    torch.manual_seed(0)
    return ZOO[name].make()


def batch_of(name: str, step: int, replica: int) -> tuple[Tensor, ...]:
    """Returns the batch of a step for a replica."""
    return ZOO[name].batch(torch.Generator().manual_seed(1000 * step + replica))


@smp.step
def train_step(model: Any, name: str, *batch: Any) -> Any:
    """Trains a model of the zoo on a batch; returns the losses of the microbatches."""
    entry = ZOO[name]
    loss = entry.loss(model(*arguments(entry, batch)), *batch)
    model.backward(loss)
    return loss
