"""`smp.generate`: the most likely tokens, in steps."""

from __future__ import annotations

import gc
import types
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from smp import transformer_reference as reference
from smp.zoo import device
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPError, SMPUsageError

WORDS, PAD = 11, 0


class Counts(nn.Module):
    """Reads all tokens before each place; has logits that differ by chance."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(WORDS, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS)
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids: Tensor) -> Any:
        seen = self.words(input_ids).cumsum(1)
        return types.SimpleNamespace(logits=self.head(self.dropout(self.mix(seen).sin() * 3)))


def prompts(replica: int) -> Tensor:
    return torch.randint(4, WORDS, (4, 2), generator=torch.Generator().manual_seed(replica))


def by_hand(ids: Tensor, count: int, end: int | None) -> Tensor:
    """The oracle: one text after the other, in one process."""
    model = Counts().eval()
    texts = []
    for text in ids:
        while len(text) < ids.shape[1] + count and (end is None or end not in text[ids.shape[1] :]):
            text = torch.cat([text, model(text[None]).logits[0, -1:].argmax(-1)])
        texts.append(text)
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)


@pytest.mark.multiprocess
@pytest.mark.parametrize("config", [{}, {"deterministic_server": True}], ids=["", "one order"])
@on_ranks("4")
def test_texts_are_those_of_one_process(config: dict[str, Any]) -> None:
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True, **config})
    ids = prompts(smp.dp_rank())
    model = smp.DistributedModel(Counts())
    end = int(by_hand(ids, 8, None)[0, 4])
    model.train()
    model.get_module().mix.eval()
    for options in ({}, {"eos_token_id": end, "pad_token_id": PAD}):
        found = smp.generate(model, ids.to(device()), 8, **options)
        wanted = by_hand(ids, 8, options.get("eos_token_id"))
        # Replicas that run their tasks in one order write until all texts have ended.
        longer = found.shape[1] - wanted.shape[1]
        assert longer == 0 or config
        assert torch.equal(found.cpu(), nn.functional.pad(wanted, (0, longer), value=PAD))
    assert model.training
    assert not model.get_module().mix.training
    assert torch.equal(smp.generate(model, ids, 0), ids)
    for text, given in (
        ("must be .B, S.", {"input_ids": ids[0]}),
        ("less than 0", {"max_new_tokens": -1}),
        ("must have the shape of input_ids", {"attention_mask": ids[:1]}),
        ("padding has to come first", {"attention_mask": torch.tensor([[1, 0]] * 4)}),
    ):
        with pytest.raises(SMPUsageError, match=text):
            smp.generate(model, **{"input_ids": ids, "max_new_tokens": 1, **given})


HEAD: dict[str, Any] = {
    "num_layers": 2,
    "activation": "gelu",
    "layernorm_epsilon": 1e-5,
    "num_attention_heads": 2,
    "attention_head_size": 4,
    "hidden_size": 8,
    "intermediate_size": 12,
    "vocab_size": 12,
    "num_positions": 12,
    "causal_mask_size": 12,
    "initializer_range": 0.5,
    "use_normal_initialization": True,
}
PRE = {"pre_layernorm": True, "post_layernorm": False}
POST = {"pre_layernorm": False, "post_layernorm": True}
HEADS: list[dict[str, Any]] = [
    {**PRE, "distribute_embedding": True},
    {**POST, "use_alibi": True, "tie_word_embeddings": False},
    {**PRE, "add_cross_attention": True, "num_token_types": 2, "sequence_parallel": True},
]


def written(model: Any, ids: Tensor, mask: Tensor, count: int) -> list[list[int]]:
    """The oracle: each text alone, in one process, without padding."""
    texts = []
    with torch.no_grad():
        for text, seen in zip(ids, mask, strict=True):
            for _ in range(count):
                kept = torch.cat([text[: len(seen)][seen.bool()], text[len(seen) :]])[None]
                logits = model((kept, None, None, None, None))
                text = torch.cat([text, logits[0, -1:].argmax(-1)])
            texts.append(text.tolist())
    return texts


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("ranks", "config"),
    [("2", {}), ("2", {"prescaled_batch": True}), ("4", {"partitions": 2})],
    ids=["batch of each rank", "one batch", "2 partitions"],
)
@on_ranks("{ranks}", timeout=120)
def test_the_language_model_of_smp_writes(ranks: str, config: dict[str, Any]) -> None:
    for options in HEADS:
        smp.init({"ddp": True, "microbatches": 2, "tensor_parallel_degree": 2, **config})
        torch.manual_seed(1)
        model = smp.DistributedModel(smp.nn.DistributedTransformerLMHead(**HEAD, **options))
        alone = reference.LMHead(**{**HEAD, **options, "add_cross_attention": False}).eval()
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        alone.load_state_dict({n: v for n, v in state.items() if "cross_attention" not in n})
        own = smp.rdp_rank() if "prescaled_batch" in config else smp.dp_rank()
        ids = torch.randint(12, (4, 3), generator=torch.Generator().manual_seed(own))
        whole, mask = torch.ones_like(ids), torch.ones_like(ids)
        mask[0, :2] = 0
        for given in (None, mask.bool()):
            found = smp.generate(model, ids.to(device()), 5, given).tolist()
            assert found == written(alone, ids, whole if given is None else mask, 5), options
        del model
        gc.collect()
        smp.shutdown()


class Pair(nn.Linear):
    def forward(self, input_ids: Tensor) -> Any:
        return (input_ids, input_ids)


def head(**options: Any) -> nn.Module:
    return smp.nn.DistributedTransformerLMHead(**{**HEAD, **options})


@pytest.mark.multiprocess
@on_ranks("2")
def test_models_that_cannot_write() -> None:
    for make, text in (
        (lambda: head(add_lm_head=False), "made with add_lm_head=True and a causal_mask_size"),
        (lambda: head(causal_mask_size=None), "made with add_lm_head=True and a causal_mask_size"),
        (lambda: Pair(1, 1), "must return logits .B, S, V., or an object .*, not a tuple"),
    ):
        smp.init({"ddp": True, "tensor_parallel_degree": 2})
        model = smp.DistributedModel(make())
        with pytest.raises(SMPError, match=text):
            smp.generate(model, torch.zeros(2, 3, dtype=torch.long), 1)
        del model
        gc.collect()
        smp.shutdown()
