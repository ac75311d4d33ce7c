"""The configuration keys, one by one.

`python -m smddp.modelparallel.config_keys FILE` writes them into a document, between two markers.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

__all__ = ["KEYS", "Key", "insert", "markdown"]

BEGIN = (
    "<!-- keys: written by `python -m smddp.modelparallel.config_keys docs/model-parallel.md` -->"
)
END = "<!-- end of keys -->"

_PLACEMENTS = ["spread", "cluster", *("".join(p) for p in itertools.permutations("DPT"))]


@dataclasses.dataclass(frozen=True)
class Key:
    """One configuration key.

    Attributes:
        name: as in the dict.
        kind: what values are allowed; see `_CHECKS`.
        default: the value when the key is absent; None means "decided from other keys".
        doc: one sentence.
        values: for kind "one of".
        later: the key belongs to a feature that this version does not have. A value other than
            the default is then refused if results would differ, and noted otherwise.
    """

    name: str
    kind: str
    default: Any
    doc: str
    values: tuple[Any, ...] = ()
    later: str = ""


# In the order in which a reader meets them. "later" is "refuse" or "note".
KEYS: tuple[Key, ...] = (
    Key("pipeline_parallel_degree", "positive", None, "Number of partitions of the model."),
    Key("partitions", "positive", None, "The same under its older name."),
    Key("microbatches", "positive", 1, "Parts into which a step divides its batch."),
    Key(
        "active_microbatches",
        "positive",
        None,
        "Most microbatches under way at once; partitions + 2 by default.",
    ),
    Key(
        "pipeline",
        "one of",
        "interleaved",
        "`interleaved` prefers backward work; `simple` runs all forward passes first.",
        ("simple", "interleaved", "_only_forward"),
    ),
    Key(
        "optimize", "one of", "memory", "What the partitioner balances first.", ("speed", "memory")
    ),
    Key(
        "memory_weight",
        "fraction",
        None,
        "Weight of memory against time in the partitioner; 0.8 for memory, 0.2 for speed.",
    ),
    Key(
        "placement_strategy",
        "one of",
        "cluster",
        "Which ranks are neighbours: `cluster` is DPT, `spread` is TPD; the rightmost letter "
        "varies fastest.",
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
    Key("ddp", "bool", False, "Data parallelism besides the pipeline; process groups."),
    Key("ddp_port", "port", None, "Port of the rendezvous if MASTER_PORT is not set."),
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
        "Serve requests in one order on all replicas. Results do not depend on it here: "
        "gradients and random numbers are ordered by microbatch in any case.",
    ),
    Key("load_partition", "bool", False, "Take the decision from partition_file."),
    Key("partition_file", "str", None, "Where the partition decision is saved or loaded."),
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
    Key("use_times", "bool", True, "Let the partitioner see computation as well as memory."),
    Key("static_mode", "bool", False, "Accepted; call plans are always reused."),
    Key("fast_mode", "bool", False, "Accepted; nothing is negotiated after the first step."),
    Key("tensor_parallel_degree", "positive", 1, "Tensor parallelism.", (), "refuse"),
    Key("prescaled_batch", "bool", False, "Batches of tensor parallelism.", (), "note"),
    Key("fp16", "bool", False, "Train in half precision throughout.", (), "refuse"),
    Key("fp16_params", "bool", False, "Half precision for distributed modules.", (), "refuse"),
    Key("bf16", "bool", False, "bfloat16 with sharded data parallelism.", (), "refuse"),
    Key("_fp32_grad_accumulation", "bool", False, "Gradients are kept in their dtype.", (), "note"),
    Key("shard_optimizer_state", "bool", False, "Divide the optimizer's state.", (), "note"),
    Key("offload_activations", "bool", False, "Move activations to the host.", (), "note"),
    Key("activation_loading_horizon", "positive", 4, "How early they return.", (), "note"),
    Key("checkpoint_attentions", "bool", False, "Recompute attention.", (), "note"),
    Key("delayed_parameter_initialization", "bool", False, "Parameters on demand.", (), "note"),
    Key("sharded_data_parallel_degree", "positive", 1, "Divide parameters too.", (), "refuse"),
    Key("sdp_reduce_bucket_size", "positive", int(5e8), "For the above: elements.", (), "note"),
    Key("sdp_param_persistence_threshold", "count", int(1e6), "For the above.", (), "note"),
    Key("sdp_max_live_parameters", "positive", int(1e9), "For the above.", (), "note"),
    Key("sdp_hierarchical_allgather", "bool", True, "For the above.", (), "note"),
    Key("sdp_gradient_clipping", "number", 1.0, "For the above.", (), "note"),
    Key("_match_weights", "bool", False, "For tests of tensor parallelism.", (), "note"),
)


def markdown() -> str:
    """Returns the keys as a Markdown table."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key in KEYS:
        default = "" if key.default is None else f"`{key.default}`"
        note = {"refuse": " *Not in this version: refused.*", "note": " *Without effect yet.*"}
        lines.append(f"| `{key.name}` | {default} | {key.doc}{note.get(key.later, '')} |")
    return "\n".join(lines) + "\n"


def insert(text: str) -> str:
    """Returns a document with the table between its markers."""
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{markdown()}{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(insert(document.read_text()))
