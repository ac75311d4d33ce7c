"""Models of transformers, and the divided ones with their weights: the same results and gradients.

transformers is in the environment of `make test-frameworks`, which runs this file with 4.27, too.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from ranks import check_ranks

import smddp.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.tensor.huggingface import gpt2, layers
from smddp.modelparallel.torch.tensor.huggingface.architectures import ARCHITECTURES, find
from smddp.modelparallel.torch.tensor.huggingface.hooks import Hooks
from smddp.modelparallel.torch.tensor.module import sequence_multiple
from smddp.modelparallel.torch.tensor.transformer.layers import DistributedTransformerLayer

transformers = pytest.importorskip("transformers", reason="run `make test-frameworks`")

pytestmark = [pytest.mark.multiprocess, pytest.mark.exhaustive, pytest.mark.timeout(660)]
B, S = 2, 7
# No dropout, because one process draws other numbers.
GPT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "n_embd": 32, "n_layer": 2}
BERT = {
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 60,
    "max_position_embeddings": 20,
}
# Name -> (architecture, class, configuration's class, its arguments).
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "gpt2": (
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT, "n_head": 4, "n_positions": 20, "vocab_size": 60},
    ),
    "gpt2 other options": (
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **GPT,
            "n_head": 4,
            "n_positions": 20,
            "vocab_size": 60,
            "n_inner": 40,
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
            "activation_function": "relu",
        },
    ),
    "gpt2 states": (
        "gpt2",
        "GPT2Model",
        "GPT2Config",
        {**GPT, "n_head": 4, "n_positions": 20, "vocab_size": 60},
    ),
    "gpt2 cross": (
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT, "n_head": 4, "n_positions": 20, "vocab_size": 60, "add_cross_attention": True},
    ),
    "gpt2 no encoder": (
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT, "n_head": 4, "n_positions": 20, "vocab_size": 60, "add_cross_attention": True},
    ),
    "gptj": (
        "gptj",
        "GPTJForCausalLM",
        "GPTJConfig",
        {**GPT, "n_head": 4, "n_positions": 20, "vocab_size": 60, "rotary_dim": 4},
    ),
    "gptneo": (
        "gptneo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 3,
            "max_position_embeddings": 20,
            "vocab_size": 60,
        },
    ),
    "bert": ("bert", "BertForMaskedLM", "BertConfig", BERT),
    "bert decoder": ("bert", "BertLMHeadModel", "BertConfig", {**BERT, "is_decoder": True}),
    "bert cross": (
        "bert",
        "BertLMHeadModel",
        "BertConfig",
        {**BERT, "is_decoder": True, "add_cross_attention": True},
    ),
    "roberta": ("roberta", "RobertaForMaskedLM", "RobertaConfig", BERT),
}
# Ends of the names of masks that old releases have in their states. A divided layer needs none.
MASKS = ".attn.bias", ".attention.bias", ".crossattention.bias", ".masked_bias"
# The inner model is divided, the head is not.
CLASSIFIER = {**GPT, "n_head": 4, "n_positions": 20, "vocab_size": 60, "pad_token_id": 0}


def make(name: str, **changed: Any) -> tuple[Any, Any]:
    """Returns the configuration and a model of transformers, with weights that are not small."""
    inner = ("gpt2", "GPT2ForTokenClassification", "GPT2Config", CLASSIFIER)
    _, kind, config_kind, options = {**MODELS, "classifier": inner}[name]
    config = getattr(transformers, config_kind)(**{**options, **changed})
    torch.manual_seed(1)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return config, model


class Replaced(nn.Module):
    """What takes the place of a class, with its hooks."""

    def __init__(self, hooks: Hooks, config: Any, **options: Any) -> None:
        super().__init__()
        _, self.kind, init, self.forward_hook, self.return_hook = hooks.arguments()
        args, kwargs = init(config)
        self.inner = self.kind(*args, **{**kwargs, **options})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.forward_hook(*args, **kwargs)
        return self.return_hook(self.inner(*args, **kwargs))


def state_of(model: Any) -> dict[str, Tensor]:
    """Returns the state of a model of transformers, without masks."""
    return without_masks(model.state_dict())


def without_masks(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if not key.endswith(MASKS)}


def divided(model: Any, config: Any, **options: Any) -> nn.Module:
    """Returns a model that computes as the given one does, over the ranks."""
    if find(type(model)) is not None:
        return replaced(model, config, **options)
    model.base_model.encoder = replaced(model.base_model.encoder, config)
    return model


def replaced(module: nn.Module, config: Any, **options: Any) -> nn.Module:
    """Returns what takes the place of a module, with its weights."""
    found = find(type(module))
    assert found is not None
    architecture, hooks = found
    result = Replaced(hooks, config, **options)
    result.inner.load_whole(architecture.translations(hooks, "")[1](module.state_dict()))
    return result.eval()


def whole_state(name: str, model: Any) -> dict[str, Tensor]:
    """Returns the state that a model has in a language model."""
    state = state_of(model)
    if "LM" in type(model).__name__:
        return state
    return {f"transformer.{key}": value for key, value in state.items()}


def results(model: Any, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Returns tensors of a result, and the loss."""
    found = model(**inputs)
    kept = {key: value for key, value in found.items() if isinstance(value, Tensor)}
    loss = kept["loss"] if "labels" in inputs else kept["last_hidden_state"].square().mean()
    return kept, loss


def compare(names: list[str]) -> None:
    world = int(os.environ["WORLD_SIZE"])
    smp.init({"ddp": True, "tensor_parallel_degree": world})
    for name in names:
        config, model = make(name)
        source = torch.Generator().manual_seed(100 + smp.rank())  # each rank has its own batch
        ids = torch.randint(5, 60, (B, S), generator=source)
        mask = torch.ones(B, S, dtype=torch.long)
        mask[:, 5:] = 0
        # The positions that are masked have results that mean nothing.
        labels = ids.masked_fill(mask == 0, -100)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if "states" not in name:
            inputs["labels"] = labels
        if "cross" in name:
            inputs["encoder_hidden_states"] = torch.randn(B, 4, 32, generator=source)
            inputs["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
        wanted, loss = results(model, inputs)
        loss.backward()
        gradient = model.get_input_embeddings().weight.grad.clone()
        states = ["gpt2", "gptj"] if world > 1 else []
        for options in [{}, *([{"distribute_embedding": True}] if name in states else [])]:
            mine = divided(model, config, **options)
            model.zero_grad()
            found, loss = results(mine, inputs)
            for key, value in wanted.items():
                torch.testing.assert_close(
                    found[key][:, :5] if value.dim() else found[key],
                    value[:, :5] if value.dim() else value,
                    rtol=1e-5,
                    atol=1e-5,
                    msg=lambda text, key=key, name=name: f"{name}: {key}: {text}",
                )
            if "distribute_embedding" in options:
                continue
            loss.backward()
            weight = (
                mine.inner.word_embedding.weight
                if isinstance(mine, Replaced)
                else mine.get_input_embeddings().weight
            )
            torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_are_those_of_transformers(size: int) -> None:
    check_ranks(compare, str(size), list(MODELS), timeout=300)


@smp.step
def train(model: Any, inputs: dict[str, Tensor]) -> Any:
    output = model(**inputs)
    model.backward(output.loss)
    return output.loss, output.logits


def in_a_step(name: str, folder: str) -> None:
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "_match_weights": True})
    _, model = make(name)
    source = torch.Generator().manual_seed(100 + smp.rank())
    ids = torch.randint(5, 60, (B, S), generator=source)
    labels = ids % 2 if name == "classifier" else ids
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones(B, S).long()}
    wanted, _ = results(model, inputs)
    before = {key: value.clone() for key, value in state_of(model).items()}
    smp.set_tensor_parallelism(model)
    model = smp.DistributedModel(model)
    loss, logits = train(model, inputs)
    torch.testing.assert_close(loss.reduce_mean(), wanted["loss"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.concat(), wanted["logits"], rtol=1e-5, atol=1e-5)
    inner = model.get_module()
    base = {
        "gpt2": lambda: inner.transformer,
        "bert": lambda: inner.bert.encoder,
        "classifier": lambda: inner.transformer.transformer,
    }[name]()
    assert len(base.seq_layers) == 2
    ((to_hf, _),) = smp.state.module_manager.translate_functions
    after = to_hf(model.state_dict())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    # Whole checkpoints have the names of transformers.
    own = {key: value.clone() for key, value in model.state_dict().items()}
    for tag in ("model.bin", "model.safetensors.index.json"):
        smp.save_checkpoint(folder, tag, partial=False, model=model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        smp.resume_from_checkpoint(folder, tag, partial=False)
        assert all(torch.equal(model.state_dict()[key], value) for key, value in own.items())
    saved = torch.load(f"{folder}/model.bin")
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", ["gpt2", "bert", "classifier"])
def test_smp_divides_a_model(name: str, tmp_path: Path) -> None:
    check_ranks(in_a_step, "2", name, str(tmp_path), timeout=120)


def batch_of(name: str, step: int, replica: int) -> dict[str, Tensor]:
    """Returns a batch of four examples. Replica 0 has masked tokens, from the third step on."""
    source = torch.Generator().manual_seed(10 * step + replica)
    ids = torch.randint(5, 60, (4, S), generator=source)
    mask = torch.ones_like(ids)
    if replica == 0 and step > 1:  # models of new releases pass no mask before
        mask[0, 5:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if "cross" in name:
        inputs["encoder_hidden_states"] = torch.randn(4, 4, 32, generator=source)
        inputs["encoder_attention_mask"] = torch.ones(4, 4, dtype=torch.long)
        inputs["encoder_attention_mask"][0, 2:] = 0
    if name == "gptj":
        inputs["position_ids"] = (2 * torch.arange(S) + replica).expand(4, -1)
    return inputs


def layers_of(model: Any) -> nn.ModuleList:
    found = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    assert len(found) == 2
    return found


def to_hugging_face(state: dict[str, Tensor]) -> dict[str, Tensor]:
    for to_hf, _ in smp.state.module_manager.translate_functions:
        state = to_hf(state)
    return without_masks(state)


def in_layers(
    configs: list[dict[str, Any]], names: list[str], marked: list[int] | None = None
) -> None:
    """Compares models that are divided, or of which some layers are, to one process."""
    for config in configs:
        for name in names:
            smp.init({"ddp": True, "microbatches": 2, "_match_weights": True, **config})
            as_alone(name, marked, config)
            gc.collect()
            smp.shutdown()


def as_alone(name: str, marked: list[int] | None, config: dict[str, Any]) -> None:
    """Trains a model in one process, and with its marked layers divided (None: all that can be)."""
    _, whole = make(name)
    _, model = make(name)
    model.config.use_cache = whole.config.use_cache = False
    for module in [model] if marked is None else [layers_of(model)[i] for i in marked]:
        smp.set_tensor_parallelism(module)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model = smp.DistributedModel(model.train())
    parts = model.get_module().modules()
    divided = [part for part in parts if isinstance(part, DistributedTransformerLayer)]
    assert len(divided) == (2 if marked is None else len(marked))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    alone = torch.optim.SGD(whole.train().parameters(), lr=0.1)
    replicas, own = smp.dp_size(), smp.dp_rank()
    if config.get("prescaled_batch"):
        replicas, own = smp.rdp_size(), smp.rdp_rank()
    for step in range(5):
        alone.zero_grad()
        wanted = {}
        for replica, half in itertools.product(range(replicas), range(2)):
            given = batch_of(name, step, replica)
            loss = whole(**{key: value.chunk(2)[half] for key, value in given.items()}).loss
            (loss / 2 / replicas).backward()
            wanted[replica, half] = loss.detach()
        alone.step()
        optimizer.zero_grad()
        losses, _ = train(model, batch_of(name, step, own))
        optimizer.step()
        for half, loss in enumerate(losses.outputs):
            torch.testing.assert_close(loss, wanted[own, half], rtol=0, atol=1e-5)
    translated = to_hugging_face(model.state_dict())
    for key, value in state_of(whole).items():
        torch.testing.assert_close(
            translated[key], value, rtol=1e-5, atol=1e-5, msg=f"{name}: {key}"
        )
    model.load_state_dict(before)
    after, before = to_hugging_face(model.state_dict()), without_masks(before)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())


TENSOR = {"tensor_parallel_degree": 2}
# Small parameters are sharded, too, and gradients are not clipped.
SHARDED = {
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 10,
    "sdp_gradient_clipping": 1e9,
}
BY_RANKS = {
    2: [TENSOR, {**TENSOR, "prescaled_batch": True}],
    4: [{**TENSOR, "partitions": 2}],
}


@pytest.mark.parametrize(("ranks", "marked"), [(2, [1]), (2, [0, 1]), (4, [0])])
def test_some_layers_are_divided(ranks: int, marked: list[int]) -> None:
    names = [name for name in MODELS if "states" not in name]
    check_ranks(in_layers, str(ranks), BY_RANKS[ranks], names, marked, timeout=600)


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, TENSOR),
        (4, {"tensor_parallel_degree": 4}),
        (4, {**TENSOR, "partitions": 2}),
        (4, {**TENSOR, **SHARDED}),
        (8, {**TENSOR, "partitions": 2}),
        (4, {**TENSOR, "partitions": 2, "prescaled_batch": True}),
    ],
    ids=["tp2", "tp4", "pp2-tp2", "tp2-sdp2", "pp2-tp2-dp2", "pp2-tp2 prescaled"],
)
def test_divided_models_train_as_in_one_process(ranks: int, config: dict[str, Any]) -> None:
    names = [name for name in MODELS if "states" not in name]
    check_ranks(in_layers, str(ranks), [config], names, timeout=600)


class Alone(nn.Module):
    """A layer that is made outside a model of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        kind = importlib.import_module("transformers.models.gpt2.modeling_gpt2").GPT2Block
        with smp.tensor_parallelism():
            self.block = kind(config, layer_idx=3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.block(self.first(x))
        return found


def made_alone() -> None:
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "_match_weights": True})
    options = {**MODELS["gpt2 other options"][3], "attn_implementation": "sdpa"}
    torch.manual_seed(1)
    model = Alone(transformers.GPT2Config(**options)).eval()
    x = torch.randn(B, S, 32) + smp.rank()
    if not hasattr(model.block.attn, "config"):
        with pytest.raises(SMPUsageError, match="does not keep its configuration in this release"):
            smp.DistributedModel(model)
        return
    wanted = model(x)
    before = dict(model.state_dict())
    model = smp.DistributedModel(model)
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    assert to_hugging_face(model.state_dict()).keys() == before.keys()


def test_a_layer_that_is_made_alone() -> None:
    check_ranks(made_alone, "2")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_cache": True}, "no argument use_cache: call the model with use_cache=False"),
        ({"cache": []}, "no argument cache: call the model with use_cache=False"),
        ({"output_attentions": True}, "with output_attentions=False"),
        ({"head_mask": torch.ones(4)}, "a layer is divided .* takes no argument head_mask"),
        ({"position_embeddings": (0, 0)}, "needs position_ids, not position_embeddings alone"),
    ],
)
def test_arguments_that_a_layer_cannot_use(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SMPUsageError, match=message):
        layers.forward_hook({"hidden_states": torch.zeros(1, 2, 3), **given})


def test_masks_that_a_layer_cannot_use() -> None:
    config = transformers.GPT2Config(attn_implementation="flash_attention_2")
    if not hasattr(config, "_attn_implementation"):
        pytest.skip("this release has one kind of masks")
    kinds = [hooks for _, *hooks in (one.hooks for one in ARCHITECTURES.values())]
    for hooks in [one for found in kinds for one in found if one.of_layer]:
        with pytest.raises(SMPUsageError, match='choose "sdpa" or "eager"'):
            hooks.init(config)


@pytest.mark.parametrize("name", list(MODELS))
def test_translation_keeps_every_bit(name: str) -> None:
    _, model = make(name)
    state = whole_state(name, model.half())
    architecture = ARCHITECTURES[MODELS[name][0]]
    back = architecture.to_hf(architecture.to_smp(state))
    if "states" in name:
        back.pop("lm_head.weight", None)
    assert back.keys() == state.keys()
    for key, value in state.items():
        assert back[key].dtype == value.dtype
        assert torch.equal(back[key], value), key
        assert back[key].is_contiguous(), key
    # A state that has been translated stays as it is.
    own = architecture.to_smp(state)
    again = architecture.to_smp(own)
    assert again.keys() == own.keys()
    assert find(type(model).__mro__[1]) is None


@pytest.mark.parametrize("name", list(MODELS))
def test_translated_states_load_with_all_buffers(name: str) -> None:
    _, model = make(name)
    _, other = make(name)
    architecture = ARCHITECTURES[MODELS[name][0]]
    (hooks,) = [one for one in architecture.hooks if one.name == type(model).__name__] or [None]
    to_hf, to_own = architecture.translations(hooks, "") if hooks else architecture[1:]
    own = to_own(model.state_dict())
    masks = model.state_dict().keys() - without_masks(model.state_dict()).keys()  # old releases
    state = to_hf(own, 20 if masks else None)
    assert to_own(state).keys() == own.keys()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    if MODELS[name][0] == "gptneo":  # its masks depend on the configuration
        assert set(other.load_state_dict(state, strict=False).missing_keys) == masks
    else:
        other.load_state_dict(state)
    for key, value in model.state_dict().items():
        assert other.state_dict()[key].dtype == value.dtype
        assert torch.equal(other.state_dict()[key], value), key
    ids = torch.randint(5, 60, (B, S), generator=torch.Generator().manual_seed(1))
    assert torch.equal(other(input_ids=ids)[0], model(input_ids=ids)[0])


@pytest.mark.parametrize("length", [None, 20])
def test_masks_of_gptj_and_gpt2_are_added_if_asked_for(length: int | None) -> None:
    for name in ("gpt2 cross", "gptj"):
        _, model = make(name)
        architecture = ARCHITECTURES[MODELS[name][0]]
        own = architecture.to_smp(model.state_dict())
        state = architecture.to_hf(own, length)
        added = state.keys() - without_masks(model.state_dict()).keys()
        attentions = 4 if name == "gpt2 cross" else 2
        assert len(added) == (2 * attentions if length else 0)
        seen = torch.ones(20, 20, dtype=torch.bool).tril()
        assert all(torch.equal(state[key][0, 0], seen) for key in added if key.endswith(".bias"))
        assert architecture.to_smp(state).keys() == own.keys()


@smp.step
def read(model: Any, inputs: dict[str, Tensor]) -> Any:
    return model(**inputs).logits


def inputs_of(name: str) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1)
    inputs = {"input_ids": torch.randint(5, 60, (B, S), generator=source)}
    if "cross" in name:
        inputs["encoder_hidden_states"] = torch.randn(B, 4, 32, generator=source)
    return inputs


def from_and_to(names: list[str], tag: str, folder: str, config: dict[str, Any]) -> None:
    """Loads files of transformers into divided models, and writes such files."""
    for name in names:
        smp.init({"ddp": True, "tensor_parallel_degree": 2, **config})
        _, whole = make(name)
        with smp.delay_param_initialization(), smp.tensor_parallelism():
            module = type(whole)(whole.config)
        model = smp.DistributedModel(module.eval())
        assert len(list(model.distributed_modules()))
        smp.resume_from_checkpoint(f"{folder}/{name}", tag, partial=False)
        with torch.no_grad():
            found = read(model, inputs_of(name)).concat()
            wanted = whole(**inputs_of(name)).logits
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        smp.save_checkpoint(f"{folder}/{name} again", tag, partial=False, model=model)
        del model, module
        gc.collect()
        smp.shutdown()


@pytest.mark.parametrize(
    ("ranks", "config"), [("2", {}), ("4", {"partitions": 2})], ids=["tp2", "pp2-tp2"]
)
def test_files_of_transformers_go_through_divided_models_bit_by_bit(
    ranks: str, config: dict[str, Any], tmp_path: Path
) -> None:
    names = ["gpt2", "gpt2 cross", "gptj", "gptneo", "bert", "roberta"]
    models = {name: make(name)[1] for name in names}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    (tag,) = {file.name for file in tmp_path.glob("gpt2/*model.*")}  # that of this release
    check_ranks(from_and_to, ranks, names, tag, str(tmp_path), config, timeout=300)
    for name, model in models.items():
        model.config.save_pretrained(tmp_path / f"{name} again")
        loaded = type(model).from_pretrained(tmp_path / f"{name} again").eval()
        for key, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value), f"{name}: {key}"
        inputs = inputs_of(name)
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits), name


def test_states_that_cannot_be_translated() -> None:
    _, model = make("gpt2")
    state = dict(model.state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(SMPUsageError, match=r"lm_head.weight and .* have to be the same tensor"):
        gpt2.translate_hf_state_dict_to_smdistributed_gpt2(state)
    own = gpt2.translate_hf_state_dict_to_smdistributed_gpt2(model.state_dict())
    del own["transformer.seq_layers.0.attention.key.weight"]
    with pytest.raises(SMPUsageError, match=r"the state has no .*key"):
        gpt2.translate_state_dict_to_hf_gpt2(own)


def test_an_argument_that_cannot_be_passed_on() -> None:
    hook = gpt2.ARCHITECTURE.hooks[0].arguments()[3]
    with pytest.raises(SMPUsageError, match="takes no argument inputs_embeds"):
        hook(inputs_embeds=torch.zeros(1, 2, 3))
    with pytest.raises(SMPUsageError, match="call it with return_dict=True"):
        hook(input_ids=torch.zeros(1, 2).long(), return_dict=False)
    init = gpt2.ARCHITECTURE.hooks[0].arguments()[2]
    with pytest.raises(SMPUsageError, match="output_hidden_states=True, which a model does not"):
        init(transformers.GPT2Config(output_hidden_states=True))


def writes(configs: list[dict[str, Any]]) -> None:
    """Compares texts of smp.generate to those of transformers, for each configuration."""
    for config in configs:
        config = dict(config)
        name = config.pop("model", "gpt2")
        smp.init({"ddp": True, "microbatches": 2, "_match_weights": True, **config})
        _, model = make(name)
        # Each rank has its own prompts, unless the batch is the same.
        own = smp.rdp_rank() if "prescaled_batch" in config else smp.dp_rank()
        ids = torch.randint(5, 60, (4, 3), generator=torch.Generator().manual_seed(own))
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        wanted = [
            model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, eos_token_id=None),
            model.generate(ids, attention_mask=mask, **GREEDY, eos_token_id=None),
        ]
        # A text ends with this token, and others do so later, or not.
        end = int(wanted[1][0, 4])
        wanted.append(model.generate(ids, attention_mask=mask, **GREEDY, eos_token_id=end))
        if smp.tp_size() > 1:
            smp.set_tensor_parallelism(model, sequence_parallel=True)  # if the batch is the same
        model = smp.DistributedModel(model)
        assert sequence_multiple(model) == (2 if "prescaled_batch" in config else 1)
        found = [
            smp.generate(model, ids, NEW),
            smp.generate(model, ids, NEW, mask),
            smp.generate(model, ids, NEW, mask, eos_token_id=end, pad_token_id=2),
        ]
        longest = found[2].shape[1]  # this rank's texts may have ended before
        wanted[2] = nn.functional.pad(wanted[2], (0, longest - wanted[2].shape[1]), value=2)
        for number, (mine, its) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(mine, its), f"{config}, {number}: {mine} and {its}"
        with pytest.raises(SMPUsageError, match="padding has to come first"):
            smp.generate(model, ids, NEW, mask.flip(-1))
        del model
        gc.collect()
        smp.shutdown()


def whole_without(name: str, options: dict[str, Any]) -> None:
    """Compares a model that is not divided as a whole, because of its options."""
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "_match_weights": True})
    _, model = make(name, use_cache=False, **options)
    ids = torch.randint(5, 60, (B, S), generator=torch.Generator().manual_seed(smp.rank()))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    before = {key: value.clone() for key, value in state_of(model).items()}
    smp.set_tensor_parallelism(model)
    module, model = model, smp.DistributedModel(model).eval()
    assert model.get_module() is module
    assert len(list(model.distributed_modules()))
    with torch.no_grad():
        found = model(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    after = without_masks(to_hugging_face(model.state_dict()))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"tie_word_embeddings": False}),
        ("gptneo", {"tie_word_embeddings": False}),
        ("gptj", {"tie_word_embeddings": True}),
        pytest.param(
            *("gptj", {"rotary_dim": None}),
            marks=pytest.mark.skipif(
                transformers.__version__ >= "5", reason="it is a number there"
            ),
        ),
        ("bert", {"position_embedding_type": "relative_key"}),
        ("bert", {"hidden_act": "silu"}),
        ("gpt2", {"output_hidden_states": True}),
    ],
)
def test_options_of_which_only_parts_are_divided(name: str, options: dict[str, Any]) -> None:
    check_ranks(whole_without, "2", name, options)


NEW = 6
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 2}


def test_generate_writes_what_transformers_writes() -> None:
    tensor = {"tensor_parallel_degree": 2}
    configs = [{"partitions": 2}, tensor, {**tensor, "prescaled_batch": True}]
    configs += [{**config, "model": "gptj"} for config in configs[1:]]
    check_ranks(writes, "2", configs, timeout=300)
