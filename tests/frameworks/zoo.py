"""Compares small random models of all types of transformers on two partitions with one process.

build/frameworks/bin/python tests/frameworks/zoo.py [--table FILE] [--turn 0/20] [TYPE ...]

Each type is a job of two ranks, which are forked, so transformers is imported once. There are
three checks: "train" compares losses and gradients of two steps; "outputs" does so with hidden
states, attentions and router logits in the loss; "generate" compares tokens that `generate()` finds
with its cache. Words of the table:

equal    the numbers of one process
refused  an error of smp says that this cannot be done
failed   another error, which one process does not raise
wrong    other numbers
hung     no result in time
-        the model has no such thing, or does not run in one process either; "alone" says why

A model that draws random numbers in training runs in eval mode, because a step draws others.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import smdistributed.modelparallel.torch as smp

MAIN = (
    *(
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "mistral",
        "mixtral",
        "gemma",
        "gemma2",
        "gemma3_text",
    ),
    *("gpt2", "bert", "roberta", "t5", "vit", "whisper", "segformer"),
)
CHECKS = ("train", "outputs", "generate")
LARGEST = 40_000_000  # parameters
BATCH, LENGTH, MICROBATCHES, STEPS, SIDE = 4, 8, 2, 2, 32
# What a model is called for: the first of these that has the type.
TASKS = (
    *("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CTC"),
    *(
        "IMAGE_TEXT_TO_TEXT",
        "SEMANTIC_SEGMENTATION",
        "IMAGE_CLASSIFICATION",
        "AUDIO_CLASSIFICATION",
    ),
    *("OBJECT_DETECTION", "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION", ""),
)
# What makes a configuration small, by the name of an attribute.
SIZES: dict[int, str] = {
    32: """hidden_size d_model n_embd dim embed_dim embedding_size embedding_dim emb_dim
        word_embed_proj_dim projection_dim hidden_dim decoder_hidden_size conv_dim d_embed
        encoder_hidden_size mamba_d_head text_embed_dim output_hidden_size out_hidden_size
        vision_hidden_size width image_size rnn_hidden_size
        attention_hidden_size lru_width d_inner""",
    64: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size
        feed_forward_size dim_feedforward encoder_intermediate_size intermediate_dim d_inner_mlp
        max_position_embeddings n_positions max_source_positions_text n_ctx expert_ffn_dim
        max_target_positions""",
    16: """moe_intermediate_size shared_expert_intermediate_size expert_dim q_lora_rank kv_lora_rank
        embedding_size_per_layer hidden_size_per_layer_input position_embedding_dim""",
    8: """head_dim d_kv attention_head_size qk_nope_head_dim v_head_dim linear_key_head_dim
        linear_value_head_dim global_head_dim d_head""",
    4: """num_attention_heads n_head encoder_attention_heads decoder_attention_heads num_heads
        n_heads num_experts num_local_experts n_routed_experts moe_num_experts patch_size
        qk_rope_head_dim rotary_dim attention_heads mamba_n_heads linear_num_value_heads""",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_decoder_layers num_encoder_layers num_key_value_heads num_experts_per_tok moe_topk
        encoder_num_layers decoder_num_layers moe_k linear_num_key_heads top_k_experts
        num_encoder_hidden_layers num_decoder_hidden_layers num_kv_heads num_block_layers
        n_kv_heads depth""",
    128: "vocab_size n_vocab text_vocab_size vocab_size_per_layer_input",
}
# Not every model runs with all of that: then only with some, from the smallest to the largest.
ATTEMPTS = (tuple(SIZES), (32, 64, 2, 128), (2, 128))
BY_NAME = [
    {name: size for size in sizes for name in SIZES[size].split()} for sizes in ATTEMPTS
]
# What these rules do not know, by type.
OVERRIDES: dict[str, dict[str, Any]] = {
    "reformer": {
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 4,
        "is_decoder": True,
    },
    "whisper": {"max_source_positions": 8, "num_mel_bins": 16},
    "segformer": {
        **{"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 3},
        **{"num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16},
    },
    "mamba2": {"head_dim": 16}, "longformer": {"attention_window": 4}, "big_bird": {"block_size": 4},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64},
}  # fmt: skip


def small(config: Any, overrides: dict[str, Any], names: dict[str, int]) -> Any:
    """Makes a configuration, and those inside it, small and without random numbers."""
    given = dict(vars(config))
    for name, value in given.items():
        if isinstance(value, transformers.PretrainedConfig):
            small(value, {}, names)
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int) and name in names:
            _set(config, name, min(value, names[name]))
        elif isinstance(value, float) and ("drop" in name or name.startswith("mask_")):
            _set(config, name, 0.0)
        elif isinstance(value, int) and name.endswith("token_id") and value > 100:
            _set(config, name, 3)
        elif name == "layer_types" and isinstance(value, list):
            # The first of each kind.
            kinds = list(dict.fromkeys(value))
            _set(config, name, (kinds * 2)[: max(2, len(kinds))])
            for layers in ("num_hidden_layers", "n_layer", "num_layers"):
                if layers in given:
                    _set(config, layers, max(2, len(kinds)))
    _turn(config, given)
    for name in ("output_router_logits",):
        if name in given:
            _set(config, name, True)
    for name, value in overrides.items():
        _set(config, name, value)
    return config


def _turn(config: Any, given: dict[str, Any]) -> None:
    """Makes what is rotated as large as heads are."""
    if "qk_rope_head_dim" in given and "head_dim" in given:
        _set(config, "head_dim", config.qk_rope_head_dim)
    for name in ("rope_scaling", "rope_parameters"):
        of_layers = given.get(name)
        several = of_layers.values() if isinstance(of_layers, dict) else ()
        for one in (of_layers, *several):
            if isinstance(one, dict) and "mrope_section" in one:
                heads = max(1, getattr(config, "num_attention_heads", 1))
                size = getattr(config, "head_dim", None) or config.hidden_size // heads
                half = int(size * one.get("partial_rotary_factor", 1.0)) // 2
                one["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def _set(config: Any, name: str, value: Any) -> None:
    with contextlib.suppress(Exception):
        setattr(config, name, value)


def make(kind: str, attempt: int = 0) -> nn.Module:
    """Returns a small random model of a type; the same in each process."""
    config = CONFIG_MAPPING[kind]()
    config = small(config, OVERRIDES.get(kind, {}), BY_NAME[attempt])
    _set(config, "use_cache", True)
    if getattr(config, "is_encoder_decoder", False):
        _set(config, "decoder_start_token_id", 2)
    # Attentions can be returned.
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(one.numel() for one in class_of(kind)(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"its small configuration has {size} parameters")
    torch.manual_seed(7)
    model = class_of(kind)(config)
    # Larger weights, so that layers matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.mul_(3.0)
    return model.float().train()


def class_of(kind: str) -> Any:
    """Returns the class of a type."""
    for task in TASKS:
        name = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
        found = getattr(modeling_auto, name, {}).get(kind)
        if found is not None:
            return getattr(transformers, found if isinstance(found, str) else found[0])
    raise ValueError(f"no task of {kind}")


def inputs(model: Any, other: bool = False) -> dict[str, torch.Tensor]:
    """Returns arguments for a model; in the other of two usual shapes, if `other` is True."""
    config, source = model.config, torch.Generator().manual_seed(1)
    text = config.get_text_config(decoder=True)
    known = inspect.signature(model.forward).parameters
    vocabulary = getattr(text, "vocab_size", None) or 64
    ids = torch.randint(4, min(vocabulary, 60), (BATCH, LENGTH), generator=source)
    name = model.main_input_name
    found: dict[str, torch.Tensor] = {}
    if name == "input_ids" or "input_ids" in known:
        found["input_ids"] = ids
        if "attention_mask" in known:
            found["attention_mask"] = torch.ones_like(ids)
    if name == "pixel_values":
        side = getattr(config, "image_size", None) or (4 * SIDE if other else SIDE)
        if not isinstance(side, int):
            side = side[0]
        channels = getattr(config, "num_channels", 3)
        found["pixel_values"] = torch.randn(BATCH, channels, side, side, generator=source)
    elif name == "input_features":
        bins = getattr(config, "num_mel_bins", 80)
        length = 2 * getattr(config, "max_source_positions", 8)
        shape = (8 * length, bins) if other else (bins, length)
        found["input_features"] = torch.randn(BATCH, *shape, generator=source)
    elif name == "input_values":
        shape = (1, 1920) if other else (800,)
        found["input_values"] = torch.randn(BATCH, *shape, generator=source)
    if config.is_encoder_decoder and "decoder_input_ids" in known:
        found["decoder_input_ids"] = ids.flip(1)
    if "labels" in known and "input_ids" in found and not config.is_encoder_decoder:
        found["labels"] = ids
    return found


def floats(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a result that have gradients."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.requires_grad:
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from floats(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from floats(one)


def loss_of(model: Any, kwargs: dict[str, Any], outputs: bool) -> tuple[torch.Tensor, int]:
    """Returns a number that depends on all that a model returns, and how many tensors that are."""
    more = {}
    if outputs:
        more = {"output_hidden_states": True, "output_attentions": True}
    found = list(floats(dict(model(**kwargs, **more))))
    return torch.stack([one.float().pow(2).mean() for one in found]).sum(), len(found)


def check_steps(model: Any, alone: Any, kwargs: dict[str, Any], outputs: bool) -> str:
    """Compares losses and gradients of steps."""
    @smp.step
    def step(model: Any, kwargs: Any) -> Any:
        loss, count = loss_of(model, kwargs, outputs)
        model.backward(loss)
        return loss.detach(), count

    bad = []
    for number in range(STEPS):
        for one in model.get_module().parameters():
            one.grad = None
        wanted, gradients = _wanted(alone, kwargs, outputs)
        # A gradient that has to be zero, such as that of a bias which softmax ignores, is noise.
        largest = max(map(_largest, gradients.values()), default=0.0)
        losses, counts = step(model, kwargs)
        for (loss, count), (want, wanted_count) in zip(
            zip(losses.outputs, list(counts), strict=True), wanted, strict=True
        ):
            if count != wanted_count:
                bad.append(f"step {number} returns {count} tensors, not {wanted_count}")
            elif abs(float(loss) - want) > 1e-4 * max(1.0, abs(want)):
                bad.append(f"the loss in step {number} is {float(loss):.6f}, not {want:.6f}")
        for name, one in model.local_named_parameters():
            found, want_grad = [
                torch.zeros_like(one) if each is None else each
                for each in (one.grad, gradients[name])
            ]
            scale = max(1e-3, 1e-2 * largest, _largest(want_grad))
            if _largest(found - want_grad) > 1e-3 * scale:
                bad.append(f"step {number}, the gradient of {name}")
    # Not before, because the other rank makes as many steps.
    return f"wrong: {bad[0]}" if bad else "equal"


def _wanted(alone: Any, kwargs: dict[str, Any], outputs: bool) -> tuple[Any, dict[str, Any]]:
    """Makes a step in one process; returns losses and gradients."""
    for one in alone.parameters():
        one.grad = None
    losses = []
    for number in range(MICROBATCHES):
        part = {name: value.chunk(MICROBATCHES)[number] for name, value in kwargs.items()}
        loss, count = loss_of(alone, part, outputs)
        (loss / MICROBATCHES).backward()
        losses.append((float(loss), count))
    return losses, {name: one.grad for name, one in alone.named_parameters()}


def _largest(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or tensor.numel() == 0 else float(tensor.abs().max())


def check_generate(model: Any, alone: Any, kwargs: dict[str, Any]) -> str:
    """Compares tokens."""
    given = {
        name: one for name, one in kwargs.items() if name not in ("labels", "decoder_input_ids")
    }
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "use_cache": True}
    training = alone.training
    alone.eval()
    try:
        wanted = alone.generate(**given, **options)
    except Exception as error:
        return f"- alone: {short(error)}"
    finally:
        alone.train(training)
    if not isinstance(wanted, torch.Tensor):
        return "- alone: no tensor of tokens"

    @smp.step
    def step(model: Any, given: Any) -> Any:
        return model.get_module().generate(**given, **options)

    model.eval()
    try:
        with torch.no_grad():
            found = step(model, given).concat()
    finally:
        model.train(training)
    if found.shape != wanted.shape or not torch.equal(found, wanted):
        return f"wrong: {found.tolist()[0]}, not {wanted.tolist()[0]}"
    return "equal"


def short(error: BaseException) -> str:
    """Returns what an error says, in one line."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[0][:300]


def run(kind: str, say: Callable[[str, str], None]) -> None:
    """Is a rank: checks a type, and says what it finds."""
    try:
        net, kwargs = find(kind)
    except Exception as error:
        for check in CHECKS:
            say(check, f"- alone: {short(error)}")
        return
    alone = copy.deepcopy(net)
    smp.init({"partitions": 2, "microbatches": MICROBATCHES})
    model = smp.DistributedModel(net)
    checks = {
        "train": lambda: check_steps(model, alone, kwargs, False),
        "outputs": lambda: check_steps(model, alone, kwargs, True),
    }
    if getattr(net, "can_generate", lambda: False)():
        checks["generate"] = lambda: check_generate(model, alone, kwargs)
    for check in CHECKS:
        if check not in checks:
            say(check, "-")
            continue
        if check == "outputs":
            try:
                loss_of(copy.deepcopy(alone), kwargs, True)
            except Exception as error:
                say(check, f"- alone: {short(error)}")
                continue
        try:
            say(check, checks[check]())
        except smp.SMPMicrobatchError as error:
            inner = str(error).partition(": ")[2].splitlines()[0]
            refused = inner.startswith("SMP")
            say(check, f"{'refused' if refused else 'failed'}: {inner[:300]}")
        except smp.SMPError as error:
            say(check, f"refused: {short(error)}")
        except Exception as error:
            say(check, f"failed: {short(error)}")


def find(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns a model that runs in one process, and its arguments."""
    first: Exception | None = None
    for attempt in range(len(ATTEMPTS)):
        try:
            net = make(kind, attempt)
        except Exception as error:
            first = first or error
            continue
        for other in (False, True):
            try:
                kwargs = inputs(net, other)
                if _draws(net, kwargs):
                    net.eval()
                    if _draws(net, kwargs):
                        raise ValueError("it draws random numbers, also in eval mode")
            except Exception as error:
                first = first or error
            else:
                return net, kwargs
    assert first is not None
    raise first


def _draws(net: Any, kwargs: dict[str, Any]) -> bool:
    """Says whether a model's numbers depend on random ones, which are others in a step."""
    first, second = [_numbers(copy.deepcopy(net), kwargs, seed) for seed in range(2)]
    return any(not torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _numbers(net: Any, kwargs: dict[str, Any], seed: int) -> list[torch.Tensor]:
    """Returns the loss and the gradients of a model."""
    torch.manual_seed(seed)
    loss, _ = loss_of(net, kwargs, False)
    loss.backward()
    none = torch.zeros(0)
    return [loss, *[none if one.grad is None else one.grad for one in net.parameters()]]


def job(kind: str, seconds: float) -> dict[str, str]:
    """Forks the ranks of a type; returns what they have found, by check."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(kind, rank, port, Path(folder)) for rank in range(2)]
        end = time.monotonic() + seconds
        left = set(children)
        while left and time.monotonic() < end:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in left:
            os.waitpid(pid, 0)
        found: dict[str, str] = {}
        for check in CHECKS:
            said = [_read(Path(folder) / f"{check}-{rank}") for rank in range(2)]
            order = ("wrong", "failed", "refused", "-", "equal")
            known = [one for one in said if one]
            worst = min(
                known, key=lambda one: order.index(one.split(":")[0].split(" ")[0]), default=""
            )
            if len(known) < 2 and not worst.startswith(("wrong", "failed", "refused")):
                worst = "hung" if left else "failed: a rank has ended without a word"
                last = _read(Path(folder) / "output-0").strip().splitlines()
                worst += f" ({last[-1][:200]})" if last else ""
            found[check] = worst
    return found


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _fork(kind: str, rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        output = os.open(folder / f"output-{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            **{"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        }
        warnings.simplefilter("ignore")

        def say(check: str, text: str) -> None:
            (folder / f"{check}-{rank}.new").write_text(text)
            (folder / f"{check}-{rank}.new").rename(folder / f"{check}-{rank}")

        run(kind, say)
        # The other rank may still need this one.
        import torch.distributed as dist

        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.barrier()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def summary(table: dict[str, dict[str, str]]) -> str:
    """Returns how many types are equal, and so on."""
    words: dict[str, int] = {}
    for found in table.values():
        said = [one.split(":")[0].split(" ")[0] for one in found.values()]
        order = ("wrong", "hung", "failed", "refused", "equal", "-")
        word = min(said, key=order.index)
        words[word] = words.get(word, 0) + 1
    ran = sum(count for word, count in words.items() if word != "-")
    parts = [f"{count} {word}" for word, count in sorted(words.items())]
    share = 100 * words.get("equal", 0) / max(1, ran)
    return f"{len(table)} types: {', '.join(parts)}; equal {share:.1f} % of those that run alone"


def main() -> int:
    """Checks types; returns 1 if something is wrong or hangs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, help="write the table there, as JSON")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each type")
    parser.add_argument("--turn", default="0/1", help="1/20: the second of 20 parts of the others")
    parser.add_argument("types", nargs="*", help="all, without")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a process with threads must not fork
    turn, parts = map(int, arguments.turn.split("/"))
    others = sorted(set(CONFIG_MAPPING.keys()) - set(MAIN))
    kinds = arguments.types or [*MAIN, *others[turn::parts]]
    table: dict[str, dict[str, str]] = {}
    for kind in kinds:
        try:
            class_of(kind)  # imported here, for both ranks
        except ValueError:
            continue  # a part of another type
        except Exception as error:
            table[kind] = dict.fromkeys(CHECKS, f"- alone: {short(error)}")
            continue
        table[kind] = job(kind, arguments.seconds)
        words = "  ".join(f"{check} {text}" for check, text in table[kind].items())
        print(f"{kind:28} {words}", flush=True)
        if arguments.table:
            arguments.table.write_text(json.dumps(table, indent=1))
    print(summary(table))
    bad = ("wrong", "hung")
    return int(any(text.startswith(bad) for one in table.values() for text in one.values()))


if __name__ == "__main__":
    sys.exit(main())
