"""The models that the step benchmark trains: three small networks, and one that only sleeps.

A step of the networks takes about 0.1 s on one core, and their gradients fill several DDP buckets.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "Trainee", "sleeper"]


@dataclasses.dataclass
class Trainee:
    """A model, and the batch that every step uses."""

    model: nn.Module
    batch: torch.Tensor

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        """Returns a loss that depends on every element of the output."""
        return output.square().mean()


def _mlp() -> Trainee:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return Trainee(nn.Sequential(*layers), torch.randn(8, 2048))


class _Transformer(nn.Module):
    def __init__(self, vocabulary: int = 8192, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return output


def _transformer() -> Trainee:
    return Trainee(_Transformer(), torch.randint(0, 8192, (2, 64)))


def _conv() -> Trainee:
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 128, 256, 512, 1024):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = width
    layers += [nn.Conv2d(1024, 2048, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    layers += [nn.Flatten(), nn.Linear(2048, 1000)]
    return Trainee(nn.Sequential(*layers), torch.randn(4, 3, 32, 32))


class _Sleep(torch.autograd.Function):
    """Sleeps instead of computing: a third of the time in forward, two thirds in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        (weight,) = ctx.saved_tensors
        return gradient, gradient.mean().expand_as(weight), None


class _Sleeper(nn.Module):
    def __init__(self, seconds: float, parameters: int, layers: int = 8) -> None:
        super().__init__()
        self.seconds = seconds / layers
        self.weights = nn.ParameterList(torch.zeros(parameters // layers) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = _Sleep.apply(x, weight, self.seconds)
        return x


def sleeper(seconds: float, parameters: int) -> Callable[[], Trainee]:
    """Returns a function that makes a model which sleeps instead of computing.

    Many nodes with such a model fit on a few cores.

    Args:
        seconds: of one step.
        parameters: number of float32 parameters.
    """

    def make() -> Trainee:
        return Trainee(_Sleeper(seconds, parameters), torch.randn(16, requires_grad=True))

    return make


MODELS: dict[str, Callable[[], Trainee]] = {
    "mlp": _mlp,
    "transformer": _transformer,
    "conv": _conv,
}
