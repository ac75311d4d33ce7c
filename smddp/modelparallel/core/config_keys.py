"""The configuration keys, one by one.

`python -m smddp.modelparallel.core.config_keys FILE` writes them into a document, between two
markers.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

__all__ = ["KEYS", "OPTIONS", "Key", "insert", "markdown"]

# No keys, but options of transformers of `smp.nn`, which scripts may take for keys.
OPTIONS = (
    *("attention_in_fp32", "distribute_embedding", "flash_attention", "fp32_residual_addition"),
    *("fused_bias_gelu", "fused_dropout", "fused_softmax", "query_key_layer_scaling"),
    *("sequence_parallel", "use_alibi", "zero_init"),
)

BEGIN = (
    "<!-- keys: written by `python -m smddp.modelparallel.core.config_keys "
    "docs/model-parallel-reference.md` -->"
)
END = "<!-- end of keys -->"

_PLACEMENTS = ["spread", "cluster", *("".join(p) for p in itertools.permutations("DPT"))]


@dataclasses.dataclass(frozen=True)
class Key:
    """One configuration key.

    Attributes:
        name: of the key in the dict.
        kind: which values are allowed; see `_CHECKS` in config.py.
        default: the value when the key is absent; None if there is none, or if other keys decide.
        doc: its meaning, in a few words or sentences, for the document.
        values: the allowed ones, for kind "one of".
        instead: for a feature that this version does not have: what happens instead. A warning says
            so once, if the configuration asks for the feature. Empty for other keys.
        differs: without the feature the results are not those that the feature would give.
        asking: the values that ask for the feature; if empty, all but the default do.
    """

    name: str
    kind: str
    default: Any
    doc: str
    values: tuple[Any, ...] = ()
    instead: str = ""
    differs: bool = False
    asking: tuple[Any, ...] = ()

    def missing(self, used: str) -> str:
        """Returns the warning that this version does not have the feature.

        Args:
            used: what the script has written to ask for it.
        """
        result = (
            "RESULTS WILL DIFFER from those with the feature"
            if self.differs
            else "Results are those of the feature, memory and speed are not"
        )
        return (
            f"smp accepts {used}, a feature that this version does not have: {self.instead}. "
            f"{result}."
        )


# In the order in which a reader meets them.
KEYS: tuple[Key, ...] = (
    Key("pipeline_parallel_degree", "positive", None, "Number of partitions of the model."),
    Key("partitions", "positive", None, "The older name of pipeline_parallel_degree."),
    Key("microbatches", "positive", 1, "Parts into which a step divides its batch."),
    Key(
        "active_microbatches",
        "positive",
        None,
        "How many microbatches may be active (begun and not ended) at a time. Default: partitions "
        "+ 2, with `simple` `microbatches` if that is more: it ends so many forward passes before "
        "the first backward pass. Always 1 with one partition.",
    ),
    Key(
        "pipeline",
        "one of",
        "interleaved",
        "`interleaved` takes forward and backward work in turns; `simple` runs the forward passes "
        "of all active microbatches first.",
        ("simple", "interleaved", "_only_forward"),
        "`_only_forward` is `interleaved`, with backward passes",
        True,
        ("_only_forward",),
    ),
    Key(
        "optimize",
        "one of",
        "memory",
        "What the partitioner balances first: it sets the default of `memory_weight`, and nothing "
        "else; not what tensor parallelism does.",
        ("speed", "memory"),
    ),
    Key(
        "memory_weight",
        "fraction",
        None,
        "Weight of memory against time in the partitioner; default 0.8 with `optimize: memory`, "
        "0.2 with `speed`.",
    ),
    Key(
        "placement_strategy",
        "one of",
        "cluster",
        "Which ranks are neighbours. The letters are D (data), P (pipeline) and T (tensor); the "
        "rightmost varies fastest. `cluster` is DPT, `spread` is TPD.",
        tuple(_PLACEMENTS),
    ),
    Key("auto_partition", "bool", True, "Divide the model automatically."),
    Key(
        "default_partition",
        "index",
        None,
        "Where modules outside any `smp.partition` go; needed without auto_partition.",
    ),
    Key("contiguous", "bool", True, "Accepted for TensorFlow scripts; without effect."),
    Key("horovod", "bool", False, "For TensorFlow scripts; excludes ddp."),
    Key("ddp", "bool", False, "Data parallelism: several replicas of the pipeline."),
    Key("ddp_port", "port", None, "Port of rank 0 for the rendezvous, if MASTER_PORT is not set."),
    Key(
        "ddp_dist_backend",
        "one of",
        "auto",
        "Backend of torch.distributed; `auto` is smddp.",
        ("auto", "nccl", "smddp", "gloo"),
    ),
    Key(
        "deterministic_server",
        "bool",
        False,
        "All replicas run their tasks in the order of the first one, so modules may call "
        "collectives over the `dp` group. Results do not depend on it otherwise.",
    ),
    Key("load_partition", "bool", False, "Load the partition from partition_file."),
    Key("partition_file", "str", None, "The file to save the partition to, or load it from."),
    Key(
        "overlapping_allreduce", "bool", True, "Default of the argument of `smp.DistributedModel`."
    ),
    Key(
        "direct_forwarding",
        "bool",
        True,
        "Let values go from one partition straight to the next, not through the caller.",
    ),
    Key(
        "partitioner",
        "one of",
        "exact",
        "How the model is divided: `exact`, or `tree` as in the SMP paper.",
        ("exact", "tree"),
    ),
    Key("skip_tracing", "bool", False, "Partition by parameters alone, without a trace."),
    Key("use_times", "bool", True, "Let the partitioner balance time as well as memory."),
    Key(
        "stall_warning_seconds",
        "number",
        30.0,
        "A rank that has worked for so many seconds on one microbatch without a break logs that, "
        "once in each step, with the module and the line of code. A rank that has been in a step "
        "for a tenth longer logs which ranks of the pipeline have not called it. 0 for never; "
        "never with one partition.",
    ),
    Key("static_mode", "bool", False, "Accepted, without effect: call graphs are always reused."),
    Key(
        "fast_mode",
        "bool",
        False,
        "Accepted, without effect: call graphs are sent once and reused.",
    ),
    Key(
        "tensor_parallel_degree",
        "positive",
        1,
        "Divide the parameters of marked modules over so many ranks; needs `ddp`.",
    ),
    Key(
        "prescaled_batch",
        "bool",
        False,
        "The ranks of a tensor-parallel group get the same batch; without it, each has its own.",
    ),
    Key(
        "fp16",
        "bool",
        False,
        "Train in half precision: the optimizer keeps master weights in fp32, and scales losses.",
    ),
    Key(
        "fp16_params",
        "bool",
        False,
        "For scripts with a half-precision optimizer of their own: modules that are divided over "
        "tensor-parallel ranks (at degree 1, too) have parameters and buffers in fp16. Other "
        "modules keep their dtype. Losses are not scaled, and there are no master weights.",
    ),
    Key("bf16", "bool", False, "Like fp16 in bfloat16, with sharded_data_parallel_degree."),
    Key(
        "_fp32_grad_accumulation",
        "bool",
        False,
        "Sum and average gradients of what fp16, bf16 or fp16_params have converted in fp32; else "
        "without effect.",
    ),
    Key(
        "shard_optimizer_state",
        "bool",
        False,
        "Divide the optimizer's state, and master weights, over the replicas of each partition. "
        "The results are the same.",
    ),
    Key(
        "offload_activations",
        "bool",
        False,
        "Move what `smp.set_activation_checkpointing` saves out of memory until the backward pass "
        "comes near: on a GPU to the host, on the CPU to a file in `TMPDIR`.",
    ),
    Key(
        "activation_loading_horizon",
        "positive",
        4,
        "So many tasks (forward or backward passes of a microbatch on a rank) before they are "
        "needed, offloaded activations begin to come back. With one partition: so many calls of "
        "modules.",
    ),
    Key(
        "checkpoint_attentions",
        "bool",
        False,
        "Compute activations of attention again.",
        (),
        "it marks no modules: call smp.set_activation_checkpointing for the attention modules",
    ),
    Key(
        "delayed_parameter_initialization",
        "bool",
        False,
        "`smp.model_creation` delays the initialization of parameters, as "
        "`smp.delay_param_initialization` does with or without this key.",
    ),
    Key(
        "sharded_data_parallel_degree",
        "positive",
        1,
        "Divide parameters, gradients and optimizer state over so many replicas (a divisor of "
        "their number); needs `ddp`.",
    ),
    Key(
        "sdp_reduce_bucket_size",
        "positive",
        int(5e8),
        "For sharding: gradients of so many elements are reduced together.",
    ),
    Key(
        "sdp_param_persistence_threshold",
        "count",
        int(1e6),
        "For sharding: parameters with fewer elements stay whole on every rank.",
    ),
    Key(
        "sdp_max_live_parameters",
        "positive",
        int(1e9),
        "For sharding: parameters are gathered ahead up to so many elements. What a running module "
        "needs is gathered in any case.",
    ),
    Key(
        "sdp_hierarchical_allgather",
        "bool",
        True,
        "Accepted, without effect: the smddp backend always gathers in two levels, between nodes "
        "and inside each node.",
    ),
    Key(
        "sdp_gradient_clipping",
        "above 0",
        1.0,
        "For sharding: the norm to which `optimizer.step` clips gradients; 1e9, for instance, to "
        "clip none.",
    ),
    Key(
        "_match_weights",
        "bool",
        False,
        "Modules that are divided over tensor-parallel ranks keep their weights, in place of new "
        "ones; for tests.",
    ),
    Key(
        "task_level_activation_checkpointing",
        "any",
        False,
        "Accepted, without effect: what it meant is not documented. Mark modules by "
        "`smp.set_activation_checkpointing`.",
    ),
)


def markdown() -> str:
    """Returns the keys as a Markdown table."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key in KEYS:
        default = "" if key.default is None else f"`{key.default}`"
        note = f" *Not in this version: {key.instead}.*" if key.instead else ""
        lines.append(f"| `{key.name}` | {default} | {key.doc}{note} |")
    return "\n".join(lines) + "\n"


def insert(text: str) -> str:
    """Returns a document with the present table between its markers."""
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{markdown()}{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(insert(document.read_text()))
