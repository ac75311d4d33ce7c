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
        vision_hidden_size width image_size rnn_hidden_size upsample_groups
        attention_hidden_size lru_width d_inner""",
    64: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size
        feed_forward_size dim_feedforward encoder_intermediate_size intermediate_dim d_inner_mlp
        max_position_embeddings n_positions max_source_positions_text n_ctx expert_ffn_dim
        max_target_positions""",
    16: """moe_intermediate_size shared_expert_intermediate_size expert_dim q_lora_rank kv_lora_rank
        embedding_size_per_layer hidden_size_per_layer_input position_embedding_dim""",
    8: """max_source_positions num_queries head_dim d_kv attention_head_size qk_nope_head_dim
        v_head_dim linear_key_head_dim linear_value_head_dim global_head_dim d_head""",
    4: """num_attention_heads n_head encoder_attention_heads decoder_attention_heads num_heads
        n_heads num_experts num_local_experts n_routed_experts moe_num_experts patch_size
        qk_rope_head_dim rotary_dim attention_heads mamba_n_heads linear_num_value_heads""",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_decoder_layers num_encoder_layers num_key_value_heads num_experts_per_tok moe_topk
        encoder_num_layers decoder_num_layers moe_k linear_num_key_heads top_k_experts
        num_encoder_hidden_layers num_decoder_hidden_layers num_kv_heads num_block_layers
        n_kv_heads depth""",
    1: "n_group topk_group",
    128: "vocab_size n_vocab text_vocab_size vocab_size_per_layer_input",
}
# The same for other names that end so.
ENDINGS = {
    **{"hidden_size": 32, "_dim": 32, "intermediate_size": 64, "ffn_dim": 64, "_heads": 4},
    **{"experts": 4, "layers": 2, "depth": 2, "vocab_size": 128, "codebook_size": 128},
    **{"num_latents": 8, "d_latents": 32},
}
# Not every model runs with all of that: then with more of it, or only with some, from the smallest
# to the largest.
ATTEMPTS = (
    *((tuple(SIZES), {}), (tuple(SIZES), ENDINGS)),
    *(((32, 64, 2, 1, 128), {}), ((2, 1, 128), {})),
)
BY_NAME = [
    ({name: size for size in sizes for name in SIZES[size].split()}, endings)
    for sizes, endings in ATTEMPTS
]
# What these rules do not know, by type.
OVERRIDES: dict[str, dict[str, Any]] = {
    "big_bird": {"block_size": 4, "attention_type": "original_full"},
    "reformer": {
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 4,
        "is_decoder": True,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {
        **{"layer_types": ["linear_attention", "full_attention"], "mamba_d_head": 16},
    },
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "whisper": {"max_source_positions": 8, "num_mel_bins": 16},
    "segformer": {
        **{"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 3},
        **{"num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16},
    },
    "mamba2": {"head_dim": 16, "n_groups": 1}, "longformer": {"attention_window": 4},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64},
}  # fmt: skip

# What the documentation tells to place: these modules keep something for their callers.
PLACES = {"reformer": "reformer.encoder.layers"}


def small(config: Any, overrides: dict[str, Any], rules: Any) -> Any:
    """Makes a configuration, and those inside it, small and without random numbers."""
    given = dict(vars(config))
    names, endings = rules
    for name, value in given.items():
        if isinstance(value, transformers.PretrainedConfig):
            small(value, {}, rules)
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int) and name in names:
            _set(config, name, min(value, names[name]))
        elif isinstance(value, int) and name.endswith(tuple(endings)):
            size = next(endings[end] for end in endings if name.endswith(end))
            _set(config, name, min(value, size))
        elif isinstance(value, float) and ("drop" in name or name.startswith("mask_")):
            _set(config, name, 0.0)
        elif isinstance(value, int) and name.endswith("token_id") and value > 100:
            _set(config, name, 3)
    if 32 in names.values():
        _stages(config, given)
    _layers(config, given)
    with contextlib.suppress(Exception):  # some are of each layer
        _heads(config, given)
    for name in ("output_router_logits",):
        if name in given:
            _set(config, name, True)
    # What has to be given.
    needed = {
        **{"vocab_size": 128, "prediction_length": 4, "context_length": 16},
        **{"num_experts_per_tok": 2, "n_routed_experts": 4},
    }
    for name, value in needed.items():
        if name in given and given[name] is None:
            _set(config, name, value)
    if not hasattr(config, "pad_token_id") or given.get("vocab_size", 0) is None:
        _set(config, "pad_token_id", 0)
    for name, value in overrides.items():
        _set(config, name, value)
    return config


def _stages(config: Any, given: dict[str, Any]) -> None:
    """Makes the stages of a model short, where a list says how deep each is."""
    for name, value in given.items():
        if isinstance(value, list | tuple) and all(type(one) is int for one in value):
            if name in ("depths", "num_blocks", "layers", "stage_num_blocks"):
                _set(config, name, type(value)(1 for _ in value))
            elif name in ("num_heads", "num_attention_heads"):
                _set(config, name, type(value)(4 for _ in value))
            elif name == "image_size":
                _set(config, name, type(value)(min(one, 4 * SIDE) for one in value))


def _layers(config: Any, given: dict[str, Any]) -> None:
    """Keeps the first layer of each kind, but at least two layers, where lists say the kinds."""
    counts = ("num_hidden_layers", "n_layer", "num_layers")
    count = next((given[name] for name in counts if isinstance(given.get(name), int)), 0)
    kinds = {
        name: value
        for name, value in given.items()
        if isinstance(value, list | tuple)
        and len(value) > 1
        and all(isinstance(one, str) for one in value)
        and ("layer" in name or "block" in name or "pattern" in name)
    }
    for size in {len(value) for value in kinds.values()}:
        same = [value for value in kinds.values() if len(value) == size]
        chosen = [
            next(n for n, each in enumerate(zip(*same, strict=True)) if each == one)
            for one in dict.fromkeys(zip(*same, strict=True))
        ][:5]
        if len(chosen) == 1:
            chosen.append(1)
        for name, value in given.items():
            per_layer = name in kinds or (
                size == count
                and isinstance(value, list | tuple)
                and all(isinstance(one, bool | int | float) for one in value)
            )
            if per_layer and len(value) == size:
                _set(config, name, [value[number] for number in chosen])
        for name in counts:
            if name in given and (size == count or size < count):
                _set(config, name, len(chosen))
    for name in ("_out_indices", "out_indices", "backbone_out_indices"):
        indices = given.get(name)
        if indices and count and all(isinstance(one, int) for one in indices):
            _set(config, "num_hidden_layers", max(2, *indices) + (name[0] == "b"))
    for name, value in given.items():
        if isinstance(value, int) and name.endswith("layer_period"):
            _set(config, name, 2)
        elif isinstance(value, int) and name.endswith("layer_offset"):
            _set(config, name, 1)
        elif isinstance(value, int) and name == "num_kv_shared_layers":
            _set(config, name, 0)


def _heads(config: Any, given: dict[str, Any]) -> None:
    """Makes what is rotated as large as heads are, and as many keys as there are queries."""
    if "qk_rope_head_dim" in given and "head_dim" in given:
        _set(config, "head_dim", config.qk_rope_head_dim)
    if "kv_lora_rank" in given and "num_key_value_heads" in given:
        _set(config, "num_key_value_heads", config.num_attention_heads)
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int) or not heads:
        return
    if "num_key_value_heads" in given and config.num_key_value_heads is None:
        _set(config, "num_key_value_heads", heads)
    if "head_dim" in given and config.head_dim is None:
        _set(config, "head_dim", hidden // heads)
    for name in ("rope_scaling", "rope_parameters"):
        of_layers = given.get(name)
        several = of_layers.values() if isinstance(of_layers, dict) else ()
        for one in (of_layers, *several):
            if isinstance(one, dict) and ("mrope_section" in one or _has_sections(config)):
                size = getattr(config, "head_dim", None) or hidden // heads
                half = int(size * one.get("partial_rotary_factor", 1.0)) // 2
                one["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def _has_sections(config: Any) -> bool:
    """Says whether a model's code divides what is rotated into sections, without being told."""
    folder = Path(inspect.getfile(type(config))).parent
    texts = [one.read_text() for one in folder.glob("modeling_*.py")]
    return any("mrope_section" in text for text in texts)


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
    """Returns the class of a type: the first with a configuration of this type, if there is one."""
    several = []
    for task in TASKS:
        name = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
        found = getattr(modeling_auto, name, {}).get(kind)
        if found is not None:
            several.append(getattr(transformers, found if isinstance(found, str) else found[0]))
    if not several:
        raise ValueError(f"no task of {kind}")
    own = [one for one in several if one.config_class is CONFIG_MAPPING[kind]]
    return (own or several)[0]


# Which arguments a model gets: the least of its usual ones, those of another usual shape, without
# labels, with all that are known; then both of the latter with another shape; longer sounds.
PLAIN, OTHER, UNLABELLED, ALL = (), ("other",), ("unlabelled",), ("unlabelled", "all")
VARIANTS = (
    *(PLAIN, OTHER, UNLABELLED, ALL, ("other", *UNLABELLED), ("other", *ALL)),
    *(("long",), ("long", *ALL)),
)


def inputs(model: Any, variant: tuple[str, ...] = PLAIN) -> dict[str, torch.Tensor]:
    """Returns arguments for a model."""
    config = model.config
    source = torch.Generator().manual_seed(1)
    text = config.get_text_config(decoder=True)
    known = inspect.signature(model.forward).parameters
    vocabulary = getattr(text, "vocab_size", None) or 64
    ids = torch.randint(
        min(4, vocabulary - 1), min(vocabulary, 60), (BATCH, LENGTH), generator=source
    )
    made = Inputs(config, ids, source, variant, known)
    name = model.main_input_name
    found: dict[str, torch.Tensor] = {}
    if name == "input_ids" or "input_ids" in known:
        found["input_ids"] = ids
        if "attention_mask" in known:
            found["attention_mask"] = torch.ones_like(ids)
    wanted = [name] if name in known else []
    wanted += [
        one.name
        for one in known.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    if "all" in variant:
        wanted += known
    for one in wanted:
        if one not in found and one not in ("labels", "decoder_input_ids"):
            value = made.of(one, one == name or known[one].default is inspect.Parameter.empty)
            if value is not None:
                found[one] = value
    if config.is_encoder_decoder and "decoder_input_ids" in known:
        found["decoder_input_ids"] = ids.flip(1)
    labelled = "unlabelled" not in variant and not config.is_encoder_decoder
    if labelled and "labels" in known and "input_ids" in found:
        found["labels"] = ids
    return found


class Inputs:
    """Makes arguments of a model by their names."""

    def __init__(self, config: Any, ids: Any, source: Any, variant: Any, known: Any) -> None:
        self._config, self._ids, self._source = config, ids, source
        self._other, self._long = "other" in variant, "long" in variant
        self._known = known

    def of(self, name: str, needed: bool) -> torch.Tensor | None:
        """Returns an argument; None if this is not known, or not wanted."""
        if "grid" in name and self._known.keys() & {"grid_thw", "image_grid_thw"}:
            return torch.tensor([[1, 4, 4]] * BATCH) if needed else None
        if name in ("pixel_values", "pixel_values_videos"):
            return self._pictures(name)
        if name in ("hidden_states", "pixel_values") and needed:
            return self._random(BATCH * 16, self._patch())
        if name in ("inputs_embeds", "query_embeds", "noise_embeds", "context_hidden_states"):
            return self._random(BATCH, LENGTH, self._size("hidden_size", 32)) if needed else None
        if name in ("input_features", "audio_mel"):
            bins = self._size("num_mel_bins", 0) or self._size("input_feat_size", 80)
            length = 2 * self._size("max_source_positions", 8)
            if self._long:
                return self._random(BATCH, length, bins * self._size("subsampling_factor", 1))
            return self._random(BATCH, *((8 * length, bins) if self._other else (bins, length)))
        if name in ("input_features_mask", "audio_mel_mask"):
            length = 2 * self._size("max_source_positions", 8) * (8 if self._other else 1)
            return torch.ones(BATCH, length, dtype=torch.long)
        if name in ("input_values", "audio"):
            if "max_length" in vars(self._config) and hasattr(self._config, "num_mel_bins"):
                return self._random(BATCH, self._config.max_length, self._config.num_mel_bins)
            if self._long:
                return self._random(BATCH, 3840)
            return self._random(BATCH, *((1, 1920) if self._other else (800,)))
        if name == "past_values":
            length = self._size("context_length", 16)
            lags = getattr(self._config, "lags_sequence", None)
            if "past_time_features" in self._known and lags:
                return self._random(BATCH, length + max(lags))
            channels = self._size("num_input_channels", 0)
            return (
                self._random(BATCH, length, channels) if channels else self._random(BATCH, length)
            )
        if name == "past_values_padding":
            return torch.zeros(BATCH, self._size("context_length", 16), dtype=torch.long)
        if name in ("past_time_features", "past_observed_mask") and needed:
            length = self._size("context_length", 16) + max(self._config.lags_sequence)
            features = self._size("num_time_features", 0) + 1
            mask = name.endswith("mask")
            return (
                self._random(BATCH, length) * 0 + 1
                if mask
                else self._random(BATCH, length, features)
            )
        if name == "freq":
            return torch.zeros(BATCH, 1, dtype=torch.long)
        if name == "bbox":
            box = torch.tensor([1, 2, 3, 4]).expand(BATCH, LENGTH, 4).clone()
            return box / 10 if self._other else box
        if name == "noise":
            return self._random(
                BATCH, (self._size("image_size", SIDE) // self._size("patch_size", 4)) ** 2
            )
        if name == "visual_feats":
            return self._random(BATCH, 4, self._size("visual_feat_dim", 32))
        if name == "visual_pos":
            return self._random(BATCH, 4, 4)
        if name in ("token_type_ids", "mm_token_type_ids"):
            return torch.zeros_like(self._ids) if needed or name.startswith("mm") else None
        if name in ("qformer_input_ids", "task_inputs", "text_input_ids"):
            return self._ids if needed else None
        if name == "spatial_shapes":
            return torch.tensor([[4, 4]] * BATCH) if needed else None
        if name == "pixel_attention_mask":
            return torch.ones(BATCH, 16, dtype=torch.long) if needed else None
        if name == "merge_sizes":
            return torch.ones(BATCH, dtype=torch.long) if needed else None
        if name == "pixel_position_ids":
            grid = torch.cartesian_prod(torch.arange(4), torch.arange(4))
            return grid.expand(BATCH, 16, 2).clone()
        if name == "flattened_patches":
            size = self._size("patch_embed_hidden_size", 768)
            place = torch.arange(1, 9).view(1, 8, 1).expand(BATCH, 8, 2)
            return torch.cat([place.float(), self._random(BATCH, 8, size)], dim=2)
        if name == "state" and needed:
            return self._random(BATCH, self._size("max_state_dim", 32))
        if name in ("prompt_pixel_values", "prompt_masks"):
            return self._pictures("pixel_values")
        return None

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._source)

    def _patch(self) -> int:
        channels = self._size("in_channels", 0) or self._size("num_channels", 3)
        return channels * self._size("temporal_patch_size", 1) * self._size("patch_size", 4) ** 2

    def _pictures(self, name: str) -> torch.Tensor:
        if self._known.keys() & {"grid_thw", "pixel_position_ids"} and not self._other:
            shape = (BATCH, 16) if "pixel_position_ids" in self._known else (BATCH * 16,)
            return self._random(*shape, self._patch())
        if "spatial_shapes" in self._known:
            return self._random(BATCH, 16, self._patch())
        channels, patch = self._size("num_channels", 3), self._size("patch_size", 4)
        if "grid_thw" in self._known:
            return self._random(BATCH * 16, channels, patch, patch)
        frames = self._size("num_frames", 0) or self._size("frames_per_clip", 0)
        if "Video" in type(self._config).__name__:
            frames = frames or 2
        matching = getattr(modeling_auto, "MODEL_FOR_KEYPOINT_MATCHING_MAPPING_NAMES", {})
        if self._config.model_type in matching:
            frames = 2
        side = self._size("image_size", 0) or self._size("crop_size", 0)
        side = side or (4 * SIDE if self._other and not frames else SIDE)
        shape = [BATCH, channels, side, self._wide or side]
        if frames and (self._other or name.endswith("videos")):
            shape.insert(1, frames)
        return self._random(*shape)

    @property
    def _wide(self) -> int:
        """The width of pictures that are not square."""
        side = getattr(self._config, "image_size", None)
        return side[1] if isinstance(side, list | tuple) and len(side) == 2 else 0

    def _size(self, name: str, default: int) -> int:
        """Returns a number of the configuration, or of one inside it."""
        found = _find(self._config, name)
        if isinstance(found, list | tuple):
            found = found[0]
        return found if isinstance(found, int) and found else default


def _find(config: Any, name: str) -> Any:
    found = getattr(config, name, None)
    for inner in vars(config).values() if found is None else ():
        if found is None and isinstance(inner, transformers.PretrainedConfig):
            found = _find(inner, name)
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
    # Logits of what is masked may be infinite.
    limited = [one.float().clamp(-1e4, 1e4) for one in found]
    return torch.stack([one.pow(2).mean() for one in limited]).sum(), len(found)


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
        buffers = [one.clone() for one in alone.buffers()]
        wanted, gradients = _wanted(alone, kwargs, outputs)
        # A gradient that has to be zero, such as that of a bias which softmax ignores, is noise.
        largest = max(map(_largest, gradients.values()), default=0.0)
        losses, counts = step(model, kwargs)
        for (loss, count), (want, wanted_count) in zip(
            zip(losses.outputs, list(counts), strict=True), wanted, strict=True
        ):
            if count != wanted_count:
                bad.append(f"step {number} returns {count} tensors, not {wanted_count}")
            elif not abs(float(loss) - want) <= 1e-4 * max(1.0, abs(want)):
                bad.append(f"the loss in step {number} is {float(loss):.6f}, not {want:.6f}")
        for name, one in model.local_named_parameters():
            found, want_grad = [
                torch.zeros_like(one) if each is None else each
                for each in (one.grad, gradients[name])
            ]
            scale = max(1e-3, 1e-2 * largest, _largest(want_grad))
            difference = _largest(found - want_grad)
            if difference > 1e-3 * scale and difference > 2 * _noise(
                alone, kwargs, outputs, name, buffers
            ):
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


def _noise(alone: Any, kwargs: Any, outputs: bool, name: str, buffers: Any) -> float:
    """Returns how much a gradient changes in one process if inputs change in the last digits."""
    after = [one.clone() for one in alone.buffers()]
    found = []
    for change in (0.0, 1e-7):
        for one, before in zip(alone.buffers(), buffers, strict=True):
            one.copy_(before)
        given = {
            name: one + change if one.is_floating_point() else one for name, one in kwargs.items()
        }
        found.append(_wanted(alone, given, outputs)[1][name])
    for one, last in zip(alone.buffers(), after, strict=True):
        one.copy_(last)
    first, second = found
    return 0.0 if first is None or second is None else _largest(first - second)


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
        # In the same parts, because what RWKV finds depends on the size of the batch.
        parts = [
            alone.generate(
                **{name: one.chunk(MICROBATCHES)[number] for name, one in given.items()}, **options
            )
            for number in range(MICROBATCHES)
        ]
    except Exception as error:
        return f"- alone: {short(error)}"
    finally:
        alone.train(training)
    if not all(isinstance(one, torch.Tensor) for one in parts):
        return "- alone: no tensor of tokens"
    wanted = torch.cat(parts)

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
    if kind in PLACES:
        smp.set_partition(net.get_submodule(PLACES[kind]), 0)
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
        for variant in VARIANTS:
            try:
                kwargs = inputs(net, variant)
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


def write(path: Path, table: dict[str, dict[str, str]]) -> None:
    """Writes a table to a file, with a line for each type."""
    config = {"torch": torch.__version__, "transformers": transformers.__version__}
    lines = [f"  {json.dumps(kind)}: {json.dumps(found)}" for kind, found in table.items()]
    head = f' "args": ["zoo.py"],\n "config": {json.dumps(config)},\n'
    path.write_text(
        f'{{\n{head} "summary": {json.dumps(summary(table))},\n "results": {{\n'
        + ",\n".join(lines)
        + "\n }\n}\n"
    )


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
            write(arguments.table, table)
    print(summary(table))
    bad = ("wrong", "hung")
    return int(any(text.startswith(bad) for one in table.values() for text in one.values()))


if __name__ == "__main__":
    sys.exit(main())
