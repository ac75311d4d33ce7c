"""The interface of the original library: signatures, and what scripts expect of each name."""

from __future__ import annotations

import inspect
import itertools
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from on_ranks import on_ranks
from ranks import check_ranks
from smp.common import evaluate
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPPartitionError, SMPUsageError
from smddp.modelparallel.torch.api.report import _report
from smddp.modelparallel.torch.pipeline.timeline import Span
from smdistributed.modelparallel.torch.patches import checkpoint as patch

_HEADS = "num_attention_heads=32, attention_head_size=32, hidden_size=1024"
_LAYER = (
    "intermediate_size=4096, attention_dropout_prob=0.1, hidden_dropout_prob=0.1, activation=gelu, "
    "layernorm_epsilon=1e-05, initializer_range=0.02, use_normal_initialization=False, "
    "causal_mask_size=None, add_cross_attention=False, pre_layernorm=False, post_layernorm=True"
)
# Name -> parameters in order, those with a default as name=default; others may follow them.
SIGNATURES: dict[str, str] = {
    "init": "config=None",
    "partition": "index",
    "set_partition": "module, index",
    "set_activation_checkpointing": "module, preserve_rng_state=True, pack_args_as_tuple=False, "
    "strategy=each",
    "send": "obj, dest_rank, rank_type",
    "recv_from": "src_rank, rank_type",
    "broadcast": "obj, group",
    "allgather": "obj, group",
    "barrier": "group=CommGroup.WORLD",
    "save": "obj, f, partial=True, pickle_module=pickle, pickle_protocol=2, v3=False",
    "load": "f, map_location=None, pickle_module=pickle, partial=True, back_compat=False",
    "save_checkpoint": "path, tag, partial=True, model=None, optimizer=None, user_content=None, "
    "translate_if_full=True, num_kept_partial_checkpoints=None",
    "resume_from_checkpoint": "path, tag=None, partial=True, strict=True, load_optimizer=True, "
    "load_sharded_optimizer_state=True, translate_function=None",
    "model_creation": "tensor_parallelism=False, dtype=None",
    "tensor_parallelism": "enabled=True",
    "set_tensor_parallelism": "module, enabled=True",
    "tp_register": "dist_module, init_hook=None, forward_hook=None, return_hook=None",
    "tp_register_with_module": "module_cls, dist_module, init_hook=None, forward_hook=None, "
    "return_hook=None",
    "delay_param_initialization": "enabled=True",
    "DistributedModel": "module, trace_device=gpu, trace_execution_times=False, "
    "trace_memory_usage=False, overlapping_allreduce=None, backward_passes_per_step=1, "
    "average_grads_across_microbatches=True, bucket_cap_mb=25, broadcast_buffers=True, "
    "gradient_as_bucket_view=False, find_unused_parameters=False",
    "DistributedModel.backward": "self, tensors, grad_tensors=None",
    "DistributedModel.state_dict": "self, gather_to_rank0=False",
    "DistributedModel.load_state_dict": "self, state_dict, strict=True, same_partition_load=False",
    "DistributedModel.register_comm_hook": "self, state, callable",
    "DistributedModel.register_post_partition_hook": "self, hook",
    "DistributedModel.register_post_step_hook": "self, hook",
    "DistributedModel.is_distributed_parameter": "self, parameter",
    "DistributedOptimizer.__new__": "cls, optimizer, static_loss_scale=1.0, "
    "dynamic_loss_scale=False, dynamic_loss_args",
    "DistributedModel.generate": "model, input_ids, max_new_tokens, attention_mask=None, "
    "eos_token_id=None, pad_token_id=None",
    "nn.DistributedLinear": "in_features, out_features, bias=True",
    "nn.DistributedEmbedding": "num_embeddings, embedding_dim, padding_idx=None, max_norm=None, "
    "norm_type=2.0, scale_grad_by_freq=False, sparse=False, _weight=None, initializer_range=0.02, "
    "_skip_allgather=False, _skip_scatter_and_merge=False",
    "nn.DistributedTransformerLMHead": f"num_layers=12, {_HEADS}, intermediate_size=4096, "
    "vocab_size=30522, num_positions=1024, attention_dropout_prob=0.1, hidden_dropout_prob=0.1, "
    "activation=gelu, layernorm_epsilon=1e-05, num_token_types=0, causal_mask_size=None, "
    "add_cross_attention=False, add_lm_head=True, initializer_range=0.02, "
    "use_normal_initialization=False, pre_layernorm=False, post_layernorm=True",
    "nn.DistributedTransformer": f"num_layers=12, {_HEADS}, {_LAYER}",
    "nn.DistributedTransformerLayer": f"{_HEADS}, {_LAYER}",
    "nn.DistributedAttentionLayer": f"{_HEADS}, attention_dropout_prob=0.1, "
    "hidden_dropout_prob=0.1, layernorm_epsilon=1e-05, initializer_range=0.02, "
    "use_normal_initialization=False, cross_attention=False, causal_mask_size=None, "
    "pre_layernorm=False, post_layernorm=True",
    "nn.DistributedTransformerOutputLayer": "hidden_size=1024, intermediate_size=4096, "
    "hidden_dropout_prob=0.1, activation=gelu, layernorm_epsilon=1e-05, initializer_range=0.02, "
    "use_normal_initialization=False, pre_layernorm=False, post_layernorm=True, "
    "fp32_residual_addition=False",
    "nn.FlashAttentionLayer": "attention_dropout_prob=0.1, attention_head_size=None, "
    "scale_attention_scores=True, scale_attn_by_layer_idx=False, layer_idx=None, scale=None, "
    "triton_flash_attention=False, use_alibi=False",
    "optimizers.FusedLAMB": "params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-06",
    "utils.rmsg": "message",
    "utils.get_distribution_axis": "parameter",
}


def as_text(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is inspect.Parameter.empty:
        return parameter.name
    return f"{parameter.name}={default.__name__ if default is pickle else default}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    found: Any = smp
    for part in name.split("."):
        found = getattr(found, part)
    texts = [as_text(parameter) for parameter in inspect.signature(found).parameters.values()]
    joined = ", ".join(texts)
    assert joined.startswith(SIGNATURES[name]), joined


def test_signatures_of_checkpoints() -> None:
    each = [as_text(p) for p in inspect.signature(patch.checkpoint_sequential).parameters.values()]
    assert ", ".join(each) == (
        "sequential_module, input, strategy=each, preserve_rng_state=True, pack_args_as_tuple=False"
    )
    assert inspect.signature(patch.checkpoint).parameters["preserve_rng_state"].default is True


class Probe(nn.Module):
    """Two parts, buffers, and a parameter passed as an argument; notes how often it is called.

    A trace leaves nothing behind in lists, so `traced` counts in an object without attributes.
    """

    called: ClassVar[list[bool]] = []
    traced: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Bilinear(4, 4, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if smp.is_tracing():
            next(self.traced)
        self.called.append(smp.is_tracing())
        return self.last(self.first(x), x * self.scale)


@smp.step(detach_outputs=False)
def train(model: Any, x: torch.Tensor) -> Any:
    output = model(x)
    loss = output.square().mean()
    model.backward(loss)
    return output, loss


class Bare:
    """An optimizer that is not torch's, like those that scripts use for fp16."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.5}]
        self.state: dict[Any, Any] = {}

    def step(self) -> str:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
        return "stepped"

    def state_dict(self) -> Any:
        return {"state": {}, "param_groups": [{"lr": self.param_groups[0]["lr"]}]}

    def load_state_dict(self, state: Any) -> None:
        self.param_groups[0]["lr"] = state["param_groups"][0]["lr"]


def gathered(named: Any) -> list[str]:
    """Returns the names of all ranks of the pipeline."""
    names = smp.allgather([name for name, _ in named], smp.PP_GROUP)
    return sorted(name for part in names for name in part)


def many_questions(pp: int, folder: str, backend: str) -> Any:
    config = {"partitions": pp, "microbatches": 2, "ddp": True, "pipeline": "_only_forward"}
    smp.init({**config, "ddp_dist_backend": backend})
    assert torch.distributed.get_backend() == {"auto": "smddp"}.get(backend, backend)
    torch.manual_seed(0)
    probe = Probe()
    inner = Bare(probe.parameters())  # before the model is wrapped
    before = [id(parameter) for parameter in probe.parameters()]
    model, optimizer = smp.DistributedModel(probe), smp.DistributedOptimizer(inner)
    assert optimizer is inner
    assert [id(parameter) for parameter in probe.parameters()] == before
    assert model.to("cpu") is model
    if pp > 1:
        assert model.cuda() is model  # nothing is moved before the partition
    assert model.train() is model
    assert not smp.is_tracing()

    # Hooks: handles remove them; each is called once; later ones at once or in the next step.
    events: list[str] = []
    kept = model.register_post_partition_hook(lambda m, o: events.append("partition"))
    for register in (model.register_post_partition_hook, model.register_post_step_hook):
        handle = register(lambda m, o: events.append("never"))
        if pp > 1 or register == model.register_post_step_hook:
            handle.remove()
        else:
            assert events.pop() == "never"  # there is a partition already
    model.register_post_step_hook(lambda m, o: events.append(f"step {o is optimizer}"))
    x = torch.arange(16.0).reshape(4, 4) / 16
    output, loss = train(model, x)
    train(model, x)
    assert events == ["partition", "step True"]
    kept.remove()
    model.register_post_partition_hook(lambda m, o: events.append("at once"))
    assert events[-1] == "at once"
    assert probe.called in ([False] * 4, [])
    assert next(probe.traced) == (1 if pp > 1 and smp.pp_rank() == 0 else 0)
    if smp.pp_rank() == 0:
        assert loss.outputs[0].requires_grad

    # Parameters that live here are moved; the others stay empty.
    for parameter in model.local_parameters():
        parameter.grad = None
    train(model, x)
    model.to(torch.float64).to(torch.float32)
    assert [p.is_meta for p in probe.parameters()].count(True) == (
        len(before) - len(list(model.local_parameters()))
    )
    assert optimizer.step() == "stepped"
    # Gradients are set to 0 in place, as by nn.Module: they may be views of a bucket.
    gradients = [parameter.grad for parameter in model.local_parameters()]
    model.zero_grad(set_to_none=False)
    for parameter, gradient in zip(model.local_parameters(), gradients, strict=True):
        assert gradient is not None
        assert parameter.grad is gradient
        assert not gradient.any()
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.local_parameters())

    # Without tensor parallelism nothing is divided that way.
    assert not list(model.distributed_modules())
    for parameter in model.local_parameters():
        assert not model.is_distributed_parameter(parameter)
        assert not model.is_scaled_batch_parameter(parameter)
        assert smp.utils.get_distribution_axis(parameter) is None
    assert not model.is_distributed_buffer(probe.seen)
    assert not model.is_scaled_batch_buffer(probe.seen)
    named = dict(model.default_reducer_named_parameters())
    assert named == dict(model.local_named_parameters())
    assert not dict(model.scaled_batch_reducer_named_parameters())
    assert gathered(model.local_named_buffers()) == ["seen"]
    assert gathered(model.local_named_modules()) == ["", "first", "last"]
    assert list(model.local_modules()) == [module for _, module in model.local_named_modules()]
    assert len(list(model.local_buffers())) == ("seen" in dict(model.local_named_buffers()))
    # Recursion over the children finds the same parameters as named_parameters.
    walked = [n for c, m in model.named_children() for n, _ in m.named_parameters(prefix=c)]
    assert walked == [name for name, _ in model.named_parameters()]

    # State dicts: the marker is not loaded as an entry, whatever its value; all else are tensors.
    full = model.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in full.values())
    assert list(full) == list(Probe().state_dict())
    assert not model.load_state_dict({**full, "_smp_is_partial": False}).missing_keys
    # Positional, too: rank 0 of the job gets it, the others get nothing.
    assert len(model.state_dict(True)) == (len(full) if smp.rank() == 0 else 0)
    assert optimizer.state_dict()["param_groups"] == [{"lr": 0.5}]
    assert optimizer.local_state_dict(gather_if_shard=False)["_smp_is_partial"]

    # File names of other versions.
    suffix = {"old": f"_{smp.mp_rank()}", "new": f"_{smp.pp_rank()}_{smp.tp_rank()}"}
    for version, end in suffix.items():
        torch.save(version, f"{folder}/{version}-{pp}{end}")
        assert smp.load(f"{folder}/{version}-{pp}", back_compat=version == "old") == version
    for rank_type in (smp.PP_RANK, smp.WORLD_RANK):
        with pytest.raises(SMPUsageError, match="cannot receive from itself"):
            smp.recv_from({smp.PP_RANK: smp.pp_rank()}.get(rank_type, smp.rank()), rank_type)
    smp.rdp_barrier()
    model.eval()
    with torch.inference_mode():
        found = [evaluate(model, x).concat() for _ in range(2)]
    with torch.no_grad():
        found.append(evaluate(model, x).concat())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    return output.concat().tolist()


@pytest.mark.multiprocess
def test_many_questions(tmp_path: Path) -> None:
    (whole,) = check_ranks(many_questions, "1", 1, str(tmp_path), "auto")
    outputs = check_ranks(many_questions, "2", 2, str(tmp_path), "smddp")
    outputs += check_ranks(many_questions, "2", 2, str(tmp_path), "gloo")
    for output in outputs:
        torch.testing.assert_close(torch.tensor(output), torch.tensor(whole))


@pytest.mark.multiprocess
@on_ranks("1")
def test_a_schedule_may_come_before_the_wrapper() -> None:
    """A schedule that was made before the optimizer was wrapped still counts its steps."""
    smp.init({"partitions": 1})
    model = smp.DistributedModel(nn.Linear(2, 2))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = smp.DistributedOptimizer(inner)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def wrong_partition_file(file: str, text: str) -> None:
    smp.init({"partitions": 2, "microbatches": 2, "load_partition": True, "partition_file": file})
    model = smp.DistributedModel(Probe())
    with pytest.raises(RuntimeError, match=text):
        train(model, torch.ones(4, 4))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "load_partition: there is no file"),
        ("[1, 2]", "holds no decision"),
        ('{"names": ["model"], "owners": [0]}', "another model: only the model has "),
        ('{"names": ["model"], "owners": [2]}', "into 3 partitions, the configuration asks for 2"),
    ],
)
def test_partition_files_that_do_not_fit(tmp_path: Path, content: str | None, text: str) -> None:
    file = tmp_path / "decision.json"
    if content is not None:
        file.write_text(content)
    check_ranks(wrong_partition_file, "2", str(file), text)
    assert issubclass(SMPPartitionError, RuntimeError)


@pytest.mark.parametrize(("ranks", "count"), [(1, 4), (2, 4), (4, 8)])
def test_the_ideal_of_a_report_is_the_bubble_of_equal_stages(ranks: int, count: int) -> None:
    """Work of one second forward and one backward: each rank waits for (ranks - 1) of both."""
    spans = [
        [
            Span(r + 3.0 * m + k, r + 3.0 * m + k + 1, m, k == 0, "")
            for m in range(count)
            for k in (0, 1)
        ]
        for r in range(ranks)
    ]
    report = _report(spans)
    assert report.ideal == pytest.approx(count / (count + ranks - 1))
    assert report.seconds == pytest.approx(3.0 * count - 1 + ranks - 1)
    assert report.busy == pytest.approx(2 * count / report.seconds)
