"""`smp.generate`: lets a language model write, one step of the pipeline for each token."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from smddp._torch_internals import forward_pre_hooks_with_kwargs
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.api.step import step
from smddp.modelparallel.torch.common.lost import smp_errors
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.model.distributed_model import DistributedModel
from smddp.modelparallel.torch.tensor.module import sequence_multiple
from smddp.modelparallel.torch.tensor.transformer.lm_head import DistributedTransformerLMHead

__all__ = ["generate"]


@step
def _next_logits(model: Any, args: tuple[Any, ...], kwargs: dict[str, Tensor], last: int) -> Tensor:
    """Returns the logits [B, V] of the token after the one at position `last`."""
    result = model(*args, **kwargs)
    logits = getattr(result, "logits", result)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        found = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(result).__name__}"
        raise SMPUsageError(
            "smp.generate: the model must return logits [B, S, V], or an object that has them as "
            f"`logits`, not {found}"
        )
    return logits[:, last]


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> Tensor:
    """Continues texts with the most likely tokens.

    Each token is a step without gradients, in which the model reads all of the text again: there is
    no cache of keys and values. All ranks of smp.MP_GROUP have to call it. With tensor parallelism
    each of them may have prompts of its own, of one shape; they go on until all texts have ended.
    With sequence_parallel the model reads texts with some tokens more, so that the number of ranks
    divides their length.

    Args:
        model: a smp.DistributedModel that takes `input_ids`, and returns logits [B, S, V] or an
            object that has them as `logits`, as the language models of Hugging Face do. Or one of
            a smp.nn.DistributedTransformerLMHead with a head and a causal mask.
        input_ids: the beginnings, [B, S]. The number of microbatches divides B.
        max_new_tokens: how many tokens are added at most.
        attention_mask: [B, S], 0 for padding, which comes first; None if there is none. With
            padding the model has to take `attention_mask` and `position_ids`. It is 1 for other
            tokens also with DistributedTransformerLMHead, whose own masks are the other way round.
        eos_token_id: ends a text; None if nothing does.
        pad_token_id: follows the end of a text; None for eos_token_id.

    Returns:
        The texts with their beginnings, [B, S + n], on the device of input_ids.

    Raises:
        SMPUsageError: an argument is wrong, the model returns something else, or the call is inside
            a step.
    """
    if state.in_step:
        raise SMPUsageError("smp.generate makes steps, so it cannot be called in one")
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise SMPUsageError(
            f"smp.generate: input_ids must be [B, S], with S > 0, not {list(input_ids.shape)}"
        )
    if max_new_tokens < 0:
        raise SMPUsageError(f"smp.generate: max_new_tokens is {max_new_tokens}, less than 0")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise SMPUsageError(
            f"smp.generate: attention_mask must have the shape of input_ids, "
            f"{list(input_ids.shape)}, not {list(attention_mask.shape)}"
        )
    if attention_mask is not None and not attention_mask[:, -1].all():
        raise SMPUsageError("smp.generate: padding has to come first, but a text ends with it")
    head = _own_head(model)
    if head is not None and not (head.add_lm_head and head.causal):
        raise SMPUsageError(
            "smp.generate: a DistributedTransformerLMHead can write only if it is made with "
            "add_lm_head=True and a causal_mask_size"
        )
    pad = eos_token_id if pad_token_id is None else pad_token_id
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    multiple = sequence_multiple(model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for _ in range(max_new_tokens):
            arguments = {"input_ids": input_ids}
            if attention_mask is not None:
                arguments["attention_mask"] = attention_mask
                arguments["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            # No token sees those that come after it.
            length = input_ids.shape[1]
            padded = {key: F.pad(x, (0, -length % multiple)) for key, x in arguments.items()}
            args, kwargs = ((), padded) if head is None else ((_tuple_of(head, padded),), {})
            logits = _next_logits(model, args, kwargs, length - 1)
            token = logits.concat().argmax(-1).to(input_ids)
            if eos_token_id is not None:
                token = token.masked_fill(ended, pad)
                ended = ended | (token == eos_token_id)
            input_ids = torch.cat([input_ids, token[:, None]], 1)
            if attention_mask is not None:
                attention_mask = torch.cat([attention_mask, attention_mask[:, -1:]], 1)
            if eos_token_id is not None and _on_all(ended):
                break
    finally:
        for module, training in modes:
            module.training = training
    return input_ids


def _own_head(model: DistributedModel) -> DistributedTransformerLMHead | None:
    """Returns the model if it is the language model of `smp.nn`, which takes one tuple.

    One that has taken the place of another model takes that one's arguments, by a hook.
    """
    root = model.get_module()
    if isinstance(root, DistributedTransformerLMHead) and not forward_pre_hooks_with_kwargs(root):
        return root
    return None


def _tuple_of(
    head: DistributedTransformerLMHead, arguments: dict[str, Tensor]
) -> tuple[Tensor | None, ...]:
    """Returns what a language model of `smp.nn` takes for arguments as in Hugging Face."""
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is not None:
        mask = 1 - mask.long()
    if head.position_embedding is None and not head.rotary:
        positions = None  # only distances count
    return arguments["input_ids"], mask, None, positions, None


# As a method, too. The class cannot have it itself, because it makes no steps.
DistributedModel.generate = generate  # type: ignore[attr-defined]


@smp_errors()
def _on_all(ended: Tensor) -> bool:
    """Says whether all texts have ended, on all ranks that have to make the same steps."""
    flag = ended.all().int()
    if state.topology.tp_size > 1:
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=state.groups.of_steps("mp"))
    if state.cfg.deterministic_server and state.topology.size_of("dp") > 1:
        # Replicas run their tasks in one order.
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=state.groups.of_steps("dp"))
    if state.groups.sharding is not None:
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=state.groups.sharding.gradients)
    return bool(flag)
