"""`smp.generate`: the most likely tokens, in steps."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from ranks import check_ranks
from smp.zoo import device
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp_smp.errors import SMPUsageError

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


def job(config: dict[str, Any]) -> None:
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


@pytest.mark.multiprocess
@pytest.mark.parametrize("config", [{}, {"deterministic_server": True}], ids=["", "one order"])
def test_texts_are_those_of_one_process(config: dict[str, Any]) -> None:
    check_ranks(job, "4", config)
