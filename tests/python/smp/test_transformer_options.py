"""Options of the transformer's modules: the guide has them all, and wrong ones are refused."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from ranks import check_ranks
from smp.test_transformer_layers import begin, named, small

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.tensor.embedding import DistributedEmbedding
from smddp.modelparallel.torch.tensor.linear import DistributedLinear
from smddp.modelparallel.torch.tensor.module import divisions_of
from smddp.modelparallel.torch.tensor.transformer.attention import DistributedAttentionLayer
from smddp.modelparallel.torch.tensor.transformer.feed_forward import (
    DistributedTransformerOutputLayer,
)
from smddp.modelparallel.torch.tensor.transformer.flash import FlashAttentionLayer
from smddp.modelparallel.torch.tensor.transformer.layers import (
    DistributedTransformer,
    DistributedTransformerLayer,
)
from smddp.modelparallel.torch.tensor.transformer.lm_head import DistributedTransformerLMHead

pytestmark = pytest.mark.multiprocess

MISUSE: dict[str, tuple[Any, str]] = {
    "heads": (lambda: DistributedAttentionLayer(num_attention_heads=3), "num_attention_heads=3"),
    "features": (
        lambda: DistributedTransformerOutputLayer(intermediate_size=7),
        "intermediate_size.*=7",
    ),
    "activation": (
        lambda: DistributedTransformerOutputLayer(activation="swish"),
        "activation='swish' is not known; use one of gelu, ",
    ),
    "no norm": (
        lambda: DistributedTransformerLayer(post_layernorm=False),
        "set pre_layernorm or post_layernorm",
    ),
    "window": (lambda: DistributedAttentionLayer(window_size=3), "needs causal_mask_size"),
    "windows": (
        lambda: DistributedTransformer(num_layers=2, causal_mask_size=4, window_size=[1]),
        "1 entries for num_layers=2",
    ),
    "scaling": (lambda: DistributedAttentionLayer(query_key_layer_scaling=True), "layer_idx"),
    "rotary": (lambda: DistributedAttentionLayer(rotary_dim=5), "rotary_dim=5 must be even"),
    "cross": (
        lambda: DistributedAttentionLayer(cross_attention=True, use_alibi=True),
        "for self-attention",
    ),
    "parallel": (
        lambda: DistributedTransformerLayer(parallel_attn_output=True),
        "parallel_attn_output needs pre_layernorm=True",
    ),
    "bias": (lambda: small(lm_head_bias=True), "needs tie_word_embeddings=False"),
    "vocabulary": (lambda: small(vocab_size=5, distribute_embedding=True), "vocab_size=5"),
    "length": (lambda: small()((torch.zeros(1, 2).long(), None)), "not one of length 2"),
    "no tuple": (lambda: small()(torch.zeros(1, 2).long()), "one tuple .input_ids.*not a Tensor"),
    "no ids": (lambda: small()((None,) * 5), "input_ids has to be .*; it is None"),
    "types": (lambda: small()((IDS, None, IDS, None, None)), "need num_token_types"),
    "labels": (lambda: small(add_lm_head=False)((IDS, None, None, None, IDS)), "add_lm_head"),
    "positions": (lambda: small()((torch.zeros(1, 5).long(), *[None] * 4)), "num_positions=4"),
    "slopes": (
        lambda: small(use_alibi=True)((IDS, None, None, IDS, None)),
        "pass None for position_ids",
    ),
    "causal": (
        lambda: small(causal_mask_size=3)((torch.zeros(1, 4).long(), *[None] * 4)),
        "more than causal_mask_size=3",
    ),
    "sequence": (
        lambda: small(sequence_parallel=True)((torch.zeros(1, 3).long(), *[None] * 4)),
        "a sequence of 3 positions cannot be divided over 2 .*; pad it to a multiple of 2",
    ),
    **{
        f"{name} {value!r}": (
            lambda name=name, value=value: small(**{name: value}),
            f"LMHead: {name}={value!r} must be {what}",
        )
        for name, value, what in (
            ("num_layers", 0, "a positive integer"),
            ("num_layers", 2.0, "a positive integer"),
            ("num_attention_heads", -2, "a positive integer"),
            ("hidden_size", 8.0, "a positive integer"),
            ("vocab_size", True, "a positive integer"),
            ("causal_mask_size", 0, "a positive integer"),
            ("num_token_types", -1, "an integer that is not negative"),
            ("hidden_dropout_prob", 1.5, "a number from 0 to 1"),
            ("attention_dropout_prob", None, "a number from 0 to 1"),
            ("embedding_dropout_prob", -0.1, "a number from 0 to 1"),
            ("initializer_range", -1, "a number that is not negative"),
        )
    },
    "layer's size": (
        lambda: DistributedTransformerLayer(intermediate_size=4.0),
        "DistributedTransformerLayer: intermediate_size=4.0 must be a positive integer",
    ),
    "stack's size": (
        lambda: DistributedTransformer(num_layers=2.0),
        "DistributedTransformer: num_layers=2.0 must be a positive integer",
    ),
    "attention's size": (
        lambda: DistributedAttentionLayer(attention_head_size=0),
        "DistributedAttentionLayer: attention_head_size=0 must be a positive integer",
    ),
    "dropout of an output layer": (
        lambda: DistributedTransformerOutputLayer(hidden_dropout_prob=2),
        "OutputLayer: hidden_dropout_prob=2 must be a number from 0 to 1",
    ),
    "layer index": (
        lambda: DistributedAttentionLayer(layer_idx=-1),
        "layer_idx=-1 must be an integer that is not negative",
    ),
    "size of a linear layer": (
        lambda: DistributedLinear(4.0, 4),
        "DistributedLinear: in_features=4.0 must be a positive integer",
    ),
    "size of an embedding": (
        lambda: DistributedEmbedding(4, 0),
        "DistributedEmbedding: embedding_dim=0 must be a positive integer",
    ),
    **{
        f"mask of shape {shape}": (
            lambda shape=shape: small()((IDS, torch.zeros(shape), None, None, None)),
            rf"attention_mask has to be \[1, 2\], \[B, S\], with 1 for a masked token; it is "
            rf"{re.escape(str(list(shape)))}",
        )
        for shape in ((1, 1, 1, 2), (1, 3), (2, 2), (2,), (1, 1))
    },
    **{
        f"{name} of {shape} and {dtype}": (
            lambda name=name, shape=shape, dtype=dtype: with_ids(
                **{name: torch.zeros(shape, dtype=dtype)}
            ),
            rf"LMHead: {name} has to be \[2, 3\], \[B, S\], (int32 or )?int64; it is "
            rf"{re.escape(str(list(shape)))}, {str(dtype).removeprefix('torch.')}$",
        )
        for name, shape, dtype in (
            ("token_type_ids", (2, 4), torch.int64),
            ("token_type_ids", (3, 3), torch.int64),
            ("token_type_ids", (2, 3), torch.float32),
            ("token_type_ids", (2, 1), torch.int64),
            ("position_ids", (2, 2), torch.int64),
            ("position_ids", (1, 2, 3), torch.int64),
            ("position_ids", (), torch.int64),
            ("position_ids", (2, 3), torch.bool),
            ("labels", (3, 2), torch.int64),  # a transposed batch gave a loss
            ("labels", (6,), torch.int64),
            ("labels", (1, 3), torch.int64),
            ("labels", (2, 3), torch.int32),
            ("labels", (2, 3, 1), torch.int64),
        )
    },
    "labels that are no tensor": (
        lambda: with_ids(labels=[[0]]),
        r"labels has to be \[2, 3\], \[B, S\], int64; it is list",
    ),
    "labels of a divided vocabulary": (
        lambda: with_ids({"distribute_embedding": True}, labels=torch.zeros(3, 2).long()),
        r"labels has to be \[2, 3\], \[B, S\], int64; it is \[3, 2\], int64",
    ),
    "token ids of one dimension": (
        lambda: small()((IDS[0], None, None, None, None)),
        r"input_ids has to be \[B, S\]; it is \[2\]",
    ),
    "token ids of floats": (
        lambda: small()((IDS.float(), None, None, None, None)),
        "input_ids has to be .*, int32 or int64; it is .*, float32",
    ),
    "rotary positions": (
        lambda: DistributedAttentionLayer(2, 4, 8, rotary_dim=2)(
            (torch.zeros(2, 3, 8), None), torch.zeros(2, 2)
        ),
        r"positions has to be \[2, 3\], \[B, S\]; it is \[2, 2\], float32",
    ),
    "mask that is no tensor": (
        lambda: small()((IDS, [[0, 0]], None, None, None)),
        "attention_mask has to be .*; it is list",
    ),
    "cross mask": (
        lambda: small(add_cross_attention=True)(
            (IDS, None, None, None, torch.zeros(1, 3, 8), torch.zeros(1, 2), None)
        ),
        r"cross_mask has to be \[1, 3\], \[B, S\], .*; it is \[1, 2\]",
    ),
    **{
        f"score mask of shape {shape}": (
            lambda shape=shape: DistributedAttentionLayer(2, 4, 8)(
                (torch.zeros(1, 3, 8), torch.zeros(shape))
            ),
            r"attention_mask has to be \[1, 1, 3, 3\], \[B, 1, 1 or queries, keys\], and is added "
            rf"to the scores; it is {re.escape(str(list(shape)))}",
        )
        for shape in ((1, 3), (1, 1, 1, 2), (1, 2, 1, 3), (1, 1, 2, 3))
    },
    "score mask of bool": (
        lambda: DistributedTransformerLayer(2, 4, 8, 8)(
            (torch.zeros(1, 3, 8), torch.ones(1, 1, 1, 3).bool())
        ),
        "attention_mask is added to the scores, and cannot be of bool: pass 0 where .* and -10000",
    ),
    **{
        f"named argument of {kind.__name__}": (
            lambda kind=kind: kind(num_attention_heads=2)(hidden_states=torch.zeros(1, 2, 1024)),
            f"{kind.__name__} takes one tuple .*, and no named argument 'hidden_states'",
        )
        for kind in (DistributedAttentionLayer, DistributedTransformerLayer)
    },
    "named argument": (
        lambda: small()(input_ids=IDS),
        "LMHead takes one tuple .input_ids, .*, and no named argument 'input_ids'",
    ),
    "nothing": (lambda: small()(), "one tuple .input_ids.*, not a NoneType"),
    "head size": (FlashAttentionLayer, "needs attention_head_size"),
    "layer": (
        lambda: FlashAttentionLayer(0.0, 4, scale_attn_by_layer_idx=True),
        "needs layer_idx",
    ),
    "alibi": (lambda: FlashAttentionLayer(0.0, 4, use_alibi=True), "triton_flash_attention"),
    "qkv": (lambda: FlashAttentionLayer(0.0, 4)(torch.zeros(2, 3, 4)), "takes qkv"),
    "mask": (
        lambda: FlashAttentionLayer(0.0, 4)(torch.zeros(1, 2, 3, 2, 4), torch.zeros(1, 1, 1, 2)),
        "attn_mask needs",
    ),
}
IDS = torch.zeros(1, 2).long()


def with_ids(options: dict[str, Any] | None = None, **given: Any) -> Any:
    names = ("token_type_ids", "position_ids", "labels")
    model = small(num_token_types=2, **(options or {}))
    return model((torch.zeros(2, 3).long(), None, *(given.get(name) for name in names)))


def table_of_names() -> list[list[str]]:
    """Returns the cells of the guide's table "Names of parameters", by rows."""
    guide = (Path(__file__).parents[3] / "docs" / "model-parallel-tensor.md").read_text()
    section = guide.split("### Names of parameters\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows[2:]]


def test_the_docstrings_describe_all_options() -> None:
    kinds = (
        DistributedTransformerLMHead,
        DistributedTransformer,
        DistributedTransformerLayer,
        DistributedAttentionLayer,
        DistributedTransformerOutputLayer,
    )
    texts = "\n".join(inspect.getdoc(kind) or "" for kind in kinds)
    described = set(re.findall(r"^    (\w+): (?!see)", texts, re.MULTILINE))
    options = {name for kind in kinds for name in inspect.signature(kind).parameters}
    assert options - described == set()


def named_parameters() -> dict[str, Any]:
    """Returns shapes of parts, and how they are divided, of a model with all modules."""
    begin()
    both = {"pre_layernorm": True, "post_layernorm": True}
    found: dict[str, Any] = {}
    for options in ({}, both):  # either norms of all layers, or one of the model
        model = small(
            attention_head_size=6,
            intermediate_size=16,
            num_token_types=3,
            distribute_embedding=True,
            tie_word_embeddings=False,
            lm_head_bias=True,
            **options,
        )
        divided = {name: each.dimension for name, each in divisions_of(model).items()}
        for name, parameter in model.named_parameters():
            found[name] = list(parameter.shape), divided.get(name)
    return found


def test_the_guide_has_the_names_of_all_parameters() -> None:
    sizes = {
        **{"vocab_size": 6, "hidden_size": 8, "num_positions": 4, "num_token_types": 3},
        **{"heads * head_size": 12, "intermediate_size": 16},
    }
    written = {}
    for modules, shape, part, bias, _ in table_of_names():
        names = re.findall("`(.*?)`", modules.replace("seq_layers.N", "seq_layers.0"))
        dimension = {"rows": 0, "columns": 1, "all": None}[part.split()[0]]
        whole = [sizes[each] for each in shape.strip("[]").split(", ")]
        for short in names:
            name = short.replace("…", names[0].rpartition(".")[0])
            weight = list(whole)
            if dimension is not None:
                weight[dimension] //= 2
            written[f"{name}.weight"] = weight, dimension
            if not bias.startswith("none"):
                halved = 0 if bias.startswith("divided") else None
                written[f"{name}.bias"] = [whole[0] // (1 if halved is None else 2)], halved
    for found in check_ranks(named_parameters, "2"):
        assert found == written


@on_ranks("2")
def test_misuse_is_an_error_that_says_what_to_do() -> None:
    begin()
    for name, (call, text) in MISUSE.items():
        with named({"misuse": name}), pytest.raises(SMPUsageError, match=text):
            call()
    with pytest.raises(RuntimeError, match="a token is not in the vocabulary of 6"):
        small(distribute_embedding=True)((IDS + 6, *[None] * 4))
    with pytest.raises(RuntimeError, match="a label is not in the vocabulary of 6"):
        small(distribute_embedding=True)((IDS, None, None, None, IDS + 6))
