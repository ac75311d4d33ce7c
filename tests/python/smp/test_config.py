"""The configuration: accepted and refused values, error texts, and which source overrides."""

from __future__ import annotations

import inspect
import json
import warnings
from pathlib import Path

import pytest

from smddp.modelparallel.core.config import ENVIRONMENT_VARIABLE, configure
from smddp.modelparallel.core.config_keys import KEYS, OPTIONS, insert, markdown
from smddp.modelparallel.core.errors import SMPConfigurationError
from smddp.modelparallel.torch.tensor.transformer.lm_head import DistributedTransformerLMHead


def test_defaults_follow_from_other_keys() -> None:
    cfg = configure({"partitions": 4, "optimize": "speed"}, {})
    assert (cfg.pipeline_parallel_degree, cfg.partitions) == (4, 4)
    assert cfg.active_microbatches == 6
    simple = {"partitions": 2, "pipeline": "simple", "microbatches": 8}
    assert configure(simple, {}).active_microbatches == 8
    assert configure({**simple, "microbatches": 3}, {}).active_microbatches == 4
    assert configure({**simple, "active_microbatches": 4}, {}).active_microbatches == 4
    assert cfg.memory_weight == 0.2
    assert configure({}, {}).memory_weight == 0.8
    assert configure({}, {}).partitions == 1
    assert configure({"placement_strategy": "spread"}, {}).placement_strategy == "TPD"


def test_environment_wins() -> None:
    environ = {ENVIRONMENT_VARIABLE: json.dumps({"microbatches": 8, "ddp": True})}
    cfg = configure({"microbatches": 2, "partitions": 2}, environ)
    assert (cfg.microbatches, cfg.partitions, cfg.ddp) == (8, 2, True)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_environment_must_be_an_object(text: str) -> None:
    with pytest.raises(SMPConfigurationError, match=ENVIRONMENT_VARIABLE):
        configure(None, {ENVIRONMENT_VARIABLE: text})


def test_a_wrong_value_says_where_it_comes_from() -> None:
    environ = {ENVIRONMENT_VARIABLE: json.dumps({"ddp": "yes"})}
    with pytest.raises(SMPConfigurationError) as caught:
        configure({"ddp": True}, environ)
    assert str(caught.value) == (
        "ddp must be a value in: [True, False]. The configuration (SM_HP_MP_PARAMETERS) has "
        "'ddp': 'yes'"
    )


@pytest.mark.parametrize("config", ["partitions", ["partitions"], {"partitions"}, 2])
def test_a_configuration_is_a_dict(config) -> None:
    with pytest.raises(SMPConfigurationError, match=r"smp.init takes a dict .*, not "):
        configure(config, {})


def test_unknown_keys_warn_with_advice() -> None:
    with pytest.warns(UserWarning, match="'microbatch'; did you mean 'microbatches'"):
        configure({"microbatch": 4}, {})
    with pytest.warns(UserWarning, match="the unknown configuration key 1$"):
        configure({1: 2}, {})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tp_degree", "tensor_parallel_degree"),
        ("tp_size", "tensor_parallel_degree"),
        ("pp_degree", "pipeline_parallel_degree"),
        ("sdp_degree", "sharded_data_parallel_degree"),
        ("sdp_max_live_params", "sdp_max_live_parameters"),
    ],
)
def test_an_abbreviated_key_is_understood(name: str, meant: str) -> None:
    with pytest.warns(UserWarning, match=f"{name!r}; did you mean {meant!r}"):
        configure({name: 2}, {})


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_a_module_is_no_key(name: str) -> None:
    assert name in inspect.signature(DistributedTransformerLMHead).parameters
    with pytest.warns(UserWarning, match=f"{name!r}: it is an argument of smp.tensor_parallelism"):
        configure({name: True}, {})


# test_errors.py has the ranks of a job try them, too.
WRONG: list[tuple[dict[str, object], str]] = [
    ({"microbatches": 0}, "The number of microbatches must be a positive integer."),
    ({"partitions": 2.0}, "The number of partitions must be a positive integer."),
    ({"active_microbatches": True}, "The number of active_microbatches must be a positive"),
    (
        {"pipeline": "both"},
        "pipeline must be a value in: ['simple', 'interleaved', '_only_forward'].",
    ),
    ({"placement_strategy": "DDP"}, "placement_strategy must be a value in: ['spread', "),
    ({"optimize": "cost"}, "optimize must be a value in: ['speed', 'memory']."),
    ({"auto_partition": 1}, "auto_partition must be a value in: [True, False]."),
    ({"partition_file": 3}, "'partition_file' must be a str."),
    (
        {"auto_partition": False, "partitions": 2},
        "default_partition must be supplied if auto_partition is set to False!",
    ),
    (
        {"default_partition": 2, "partitions": 2},
        "default_partition must be less than the number of partitions!",
    ),
    ({"memory_weight": 1.5}, "memory_weight must be between 0.0 and 1.0!"),
    ({"ddp_port": 1}, "`ddp_port` needs `ddp` to be set as well"),
    ({"ddp_dist_backend": "nccl"}, "`ddp_dist_backend` needs `ddp` to be set as well"),
    ({"ddp": True, "ddp_port": -1}, "Invalid port number -1."),
    ({"ddp": True, "ddp_dist_backend": "mpi"}, "ddp_dist_backend must be a value in: ['auto', "),
    ({"default_partition": 1}, "default_partition must be less than the number of partitions!"),
    (
        {"default_partition": 2, "pipeline_parallel_degree": 2, "auto_partition": False},
        "default_partition must be less than the number of partitions!",
    ),
    ({"default_partition": -1}, "default_partition must be the number of a partition."),
    ({"tensor_parallel_degree": 2, "ddp": False}, "greater than 1 needs ddp: set ddp to True."),
    ({"tensor_parallel_degree": 0}, "The number of tensor_parallel_degree must be a positive"),
    ({"fp16_params": 1}, "fp16_params must be a value in: [True, False]."),
    ({"checkpoint_attentions": "yes"}, "checkpoint_attentions must be a value in: [True, False]."),
    (
        {"ddp": True, "horovod": True},
        "'ddp' and 'horovod' cannot be simultaneously enabled.",
    ),
    ({"partitions": 2, "pipeline_parallel_degree": 4}, "mean the same"),
    (
        {"tensor_parallel_degree": 2},
        "tensor_parallel_degree greater than 1 needs ddp: set ddp to True.",
    ),
    ({"bf16": True}, "bf16 needs sharded_data_parallel_degree"),
    ({"fp16": True, "bf16": True}, "fp16 and bf16 cannot be simultaneously enabled."),
    (
        {"ddp": True, "sharded_data_parallel_degree": 2, "shard_optimizer_state": True},
        "exclude each other",
    ),
    ({"load_partition": True}, "load_partition needs partition_file."),
    (
        {"microbatches": "four"},
        "must be a positive integer. The configuration (smp.init) has 'microbatches': 'four'",
    ),
]


@pytest.mark.parametrize(("config", "text"), WRONG)
def test_wrong_values(config: dict[str, object], text: str) -> None:
    with pytest.raises(SMPConfigurationError) as caught:
        configure(config, {})
    assert text in str(caught.value)


DEGREE = "sharded_data_parallel_degree"


WRONG_TOGETHER: list[tuple[dict[str, object], tuple[str, ...], str]] = [
    ({DEGREE: 2}, (DEGREE, "ddp"), "set ddp to True"),
    ({DEGREE: 2, "ddp": False}, (DEGREE, "ddp"), "set ddp to True"),
    (
        {DEGREE: 2, "shard_optimizer_state": True, "ddp": True},
        (DEGREE, "shard_optimizer_state"),
        "leave out shard_optimizer_state",
    ),
    ({DEGREE: 2, "bf16": True, "fp16": True}, ("fp16", "bf16"), "Set one of them"),
    ({"bf16": True}, ("bf16", DEGREE), "set that, or use fp16"),
    ({"bf16": True, DEGREE: 1}, ("bf16", DEGREE), "set that, or use fp16"),
    ({DEGREE: 0}, (DEGREE,), "must be a positive integer"),
    ({"sdp_reduce_bucket_size": 0}, ("sdp_reduce_bucket_size",), "must be a positive integer"),
    ({"sdp_max_live_parameters": 1.5}, ("sdp_max_live_parameters",), "a positive integer"),
    (
        {"sdp_param_persistence_threshold": -1},
        ("sdp_param_persistence_threshold",),
        "must be an integer that is not negative",
    ),
    ({"sdp_gradient_clipping": "1"}, ("sdp_gradient_clipping",), "a number greater than 0"),
    ({"sdp_gradient_clipping": 0}, ("sdp_gradient_clipping",), "a number greater than 0"),
    ({"activation_loading_horizon": 0}, ("activation_loading_horizon",), "a positive integer"),
    ({"offload_activations": "yes"}, ("offload_activations",), "in: [True, False]"),
]


@pytest.mark.parametrize(("config", "named", "advice"), WRONG_TOGETHER)
def test_models_that_do_not_fit_configured_wrong(
    config: dict[str, object], named: tuple[str, ...], advice: str
) -> None:
    with pytest.raises(SMPConfigurationError) as caught:
        configure(config, {})
    for text in (*named, advice):
        assert text in str(caught.value)


@pytest.mark.parametrize("key", [key.name for key in KEYS if key.name.startswith("sdp_")])
def test_keys_of_sharding_without_it(key: str) -> None:
    config = {key: False if key == "sdp_hierarchical_allgather" else 7}
    with pytest.warns(UserWarning, match=f"{key}=.* has no effect: set sharded_data_parallel"):
        configure(config, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configure({**config, "sharded_data_parallel_degree": 2, "ddp": True}, {})


@pytest.mark.parametrize("key", [key for key in KEYS if key.instead], ids=lambda key: key.name)
def test_features_of_later_versions_are_accepted_and_named(key) -> None:
    values = {"bool": not key.default, "positive": 2, "count": 7, "one of": "_only_forward"}
    value = values[key.kind]
    config = {key.name: value, "ddp": True}
    with pytest.warns(UserWarning, match=f"smp accepts {key.name}=") as said:
        assert getattr(configure(config, {}), key.name) == value
    text = next(str(w.message) for w in said if f"accepts {key.name}=" in str(w.message))
    assert ("RESULTS WILL DIFFER" in text) == (key.name == "pipeline")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configure({**config, "nonsense": 1}, {}, warn=False)  # as the other ranks do


@pytest.mark.parametrize("value", [True, 1, "all", None, {}])
def test_a_key_of_unknown_meaning_is_accepted_in_silence(value) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg = configure({"task_level_activation_checkpointing": value}, {})
    assert cfg.task_level_activation_checkpointing == value


def test_every_key_is_an_attribute_and_silent_by_default() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg = configure({key.name: key.default for key in KEYS if key.default is not None}, {})
        configure({"pipeline": "simple"}, {})
    for key in KEYS:
        assert hasattr(cfg, key.name)
        assert f"| `{key.name}` |" in markdown()
    with pytest.raises(AttributeError, match="no configuration key 'colour'"):
        _ = cfg.colour


def test_the_documented_table_is_the_real_one() -> None:
    text = (Path(__file__).parents[3] / "docs" / "model-parallel-reference.md").read_text()
    command = "python -m smddp.modelparallel.core.config_keys docs/model-parallel-reference.md"
    assert insert(text) == text, f"run {command}"
