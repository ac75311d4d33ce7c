"""An embedding whose features are divided over the ranks of a tp group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.tensor.arguments import check_arguments
from smddp.modelparallel.torch.tensor.exchange import Exchange
from smddp.modelparallel.torch.tensor.module import DistributedModule, Division

__all__ = ["DistributedEmbedding"]


class DistributedEmbedding(DistributedModule):
    """Does what `torch.nn.Embedding` does; each rank has a part of the features of every row.

    Args:
        num_embeddings: the number of rows.
        embedding_dim: of the whole embedding; the number of ranks has to divide it.
        padding_idx: a row of zeros that gets no gradient.
        max_norm: must be None: the norm of a row would need all ranks.
        norm_type: of max_norm.
        scale_grad_by_freq: divide the gradient of a row by how often it occurs in the examples of
            all ranks.
        sparse: must be False.
        _weight: the whole weight, [num_embeddings, embedding_dim]; None for a new one.
        initializer_range: standard deviation of new weights.
        _skip_allgather: the input has the examples of all ranks already.
        _skip_scatter_and_merge: return all examples with this rank's part of the features.
        device: torch's default if None.
        dtype: torch's default if None.
        exchange: see `DistributedModule`.

    Raises:
        SMPUsageError: the number of ranks does not divide embedding_dim, or an argument is not
            allowed.
    """

    # As nn.Embedding. So dropout in a model is that of the model before modules were replaced.
    draws_random_numbers = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        exchange: Exchange | None = None,
    ) -> None:
        check_arguments("DistributedEmbedding", locals())
        super().__init__(exchange)
        for name, value in (("max_norm", max_norm), ("sparse", sparse or None)):
            if value is not None:
                raise SMPUsageError(
                    f"DistributedEmbedding: {name}={value} is not possible, because each rank has "
                    "a part of every row; leave it out, or turn tensor parallelism off for it"
                )
        shape = (num_embeddings, embedding_dim)
        if _weight is not None and tuple(_weight.shape) != shape:
            raise SMPUsageError(
                f"DistributedEmbedding: _weight has to be whole, of shape {list(shape)}; it has "
                f"{list(_weight.shape)}"
            )
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise SMPUsageError(
                f"DistributedEmbedding: padding_idx {padding_idx} is no row of {num_embeddings}"
            )
        self.num_embeddings, self.embedding_dim = shape
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self._gathers, self._unites = not _skip_allgather, not _skip_scatter_and_merge

        def set_weight(whole: Tensor) -> None:
            if _weight is not None:
                whole.copy_(_weight)
                return
            nn.init.normal_(whole, 0.0, initializer_range)
            if self.padding_idx is not None:
                whole[self.padding_idx].zero_()

        self.weight = self.new_parameter("weight", shape, set_weight, Division(1), device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows of this rank's examples, [B, ...] -> [B, ..., embedding_dim].

        Args:
            input: row numbers.
        """
        examples = input if input.dim() > 0 else input.unsqueeze(0)
        rows = self.exchange.gather(examples) if self._gathers else examples
        part = nn.functional.embedding(
            rows, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )
        if not self._unites:
            return part
        result = self.exchange.unite(part)
        return result if input.dim() > 0 else result.squeeze(0)

    def extra_repr(self) -> str:
        """Returns the arguments, for `repr`."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, ranks={self.exchange.size}"
