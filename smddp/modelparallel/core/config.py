"""Checks a configuration: types, values, and rules between keys; config_keys.py lists the keys.

The configuration is a plain dict, as in the `parameters` of a SageMaker estimator. The values of
the environment variable SM_HP_MP_PARAMETERS override those that the script passes.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smddp.modelparallel.core.config_keys import KEYS, OPTIONS, Key
from smddp.modelparallel.core.errors import SMPConfigurationError, SMPError, SMPInitializationError
from smddp.modelparallel.core.logs import log, warn_user

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "Configuration",
    "compare",
    "configure",
    "port_of",
    "warn_of_second",
]

ENVIRONMENT_VARIABLE = "SM_HP_MP_PARAMETERS"

_BY_NAME = {key.name: key for key in KEYS}
_ABBREVIATIONS = {
    "dp": "data_parallel",
    "pp": "pipeline_parallel",
    "sdp": "sharded_data_parallel",
    "tp": "tensor_parallel",
}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


# Kind of a key -> (is the value right?, the error text if not).
_CHECKS: dict[str, tuple[Callable[[Key, Any], bool], str]] = {
    "any": (lambda *_: True, ""),
    "positive": (
        lambda _, v: _is_int(v) and v >= 1,
        "The number of {name} must be a positive integer.",
    ),
    "count": (
        lambda _, v: _is_int(v) and v >= 0,
        "{name} must be an integer that is not negative.",
    ),
    "index": (lambda _, v: _is_int(v) and v >= 0, "{name} must be the number of a partition."),
    "port": (lambda _, v: _is_int(v) and v >= 0, "Invalid port number {value}."),
    "bool": (lambda _, v: isinstance(v, bool), "{name} must be a value in: [True, False]."),
    "one of": (lambda k, v: v in k.values, "{name} must be a value in: {values}."),
    "str": (lambda _, v: isinstance(v, str), "'{name}' must be a str."),
    "number": (lambda _, v: _is_number(v), "{name} must be a number."),
    "above 0": (lambda _, v: _is_number(v) and v > 0, "{name} must be a number greater than 0."),
    "fraction": (
        lambda _, v: _is_number(v) and 0.0 <= v <= 1.0,
        "{name} must be between 0.0 and 1.0!",
    ),
}


class Configuration:
    """The configuration that is used, with all defaults: every key is an attribute."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"smp has no configuration key {name!r}") from None

    def as_dict(self) -> dict[str, Any]:
        """Returns a copy as a dict."""
        return dict(self._values)

    def __repr__(self) -> str:
        return f"Configuration({self._values})"


def configure(
    config: Mapping[str, Any] | None,
    environ: Mapping[str, str],
    warn: bool = True,
    refuse: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Configuration:
    """Returns the configuration in force: defaults < `config` < SM_HP_MP_PARAMETERS.

    Args:
        config: what the script passes.
        environ: the environment.
        warn: warn of unknown keys, and of features that this version does not have; only one
            rank of a job does so.
        refuse: gets the known keys that are given; raises SMPConfigurationError if the framework
            does not have one, before rules between keys could ask for others.

    Raises:
        SMPConfigurationError: a value is wrong, or two keys contradict each other.
    """
    if config is not None and not isinstance(config, Mapping):
        raise SMPConfigurationError(
            f"smp.init takes a dict of configuration keys, not {type(config).__name__}: {config!r}"
        )
    from_environment = _from_environment(environ)
    given = {**(config or {}), **from_environment}
    known = {name: value for name, value in given.items() if name in _BY_NAME}
    for name in sorted(given.keys() - known.keys(), key=str) if warn else ():
        warn_user(f"smp ignores the unknown configuration key {name!r}{_advice(str(name))}")
    for name, value in known.items():
        _check_value(_BY_NAME[name], value, _place(name, from_environment))
    refuse(known)
    _check_together(known)
    values = {key.name: known.get(key.name, key.default) for key in KEYS}
    _complete(values, known)
    if warn:
        _say_what_is_missing(values)
        _say_what_has_no_effect(values)
    return Configuration(values)


def _advice(name: str) -> str:
    """Returns what to write instead of an unknown key, if that can be guessed."""
    if name in OPTIONS:
        return ": it is an argument of smp.tensor_parallelism and of the classes of smp.nn"
    spelled = "_".join(_ABBREVIATIONS.get(word, word) for word in name.split("_"))
    for written in (name, spelled):
        if nearest := difflib.get_close_matches(written, _BY_NAME, n=1):
            return f"; did you mean {nearest[0]!r}?"
    return ""


def warn_of_second(config: Mapping[str, Any] | None, current: Configuration) -> None:
    """Warns if a second `smp.init` has another configuration than the one in force.

    Args:
        config: what the script passes; None means the one in force.
        current: the one in force.

    Raises:
        SMPConfigurationError: it makes no sense.
    """
    if config is None:
        return
    now = current.as_dict()
    again = configure(config, os.environ, warn=False).as_dict()
    different = [f"{name}={again[name]!r}" for name in again if again[name] != now[name]]
    if different:
        log.warning(
            "smp.init: a second call does nothing; this configuration is not used: %s. "
            "Call smp.shutdown() before",
            ", ".join(different),
        )


def compare(of_ranks: Sequence[Mapping[str, Any] | SMPError]) -> None:
    """Raises what a rank has raised, or if ranks have different configurations.

    With these, their groups would not match.

    Args:
        of_ranks: `Configuration.as_dict()` of each rank of the job, or its error.

    Raises:
        SMPError: of the class of a rank's error; the text names the rank.
        SMPInitializationError: they differ.
    """
    for rank, one in enumerate(of_ranks):
        if isinstance(one, SMPError):
            raise type(one)(f"rank {rank}: {one}")
    first, *others = [one for one in of_ranks if not isinstance(one, SMPError)]
    for rank, other in enumerate(others, 1):
        different = [
            f"{name} is {first[name]!r} on rank 0, {value!r} on rank {rank}"
            for name, value in other.items()
            if value != first[name]
        ]
        if different:
            raise SMPInitializationError(
                f"the ranks have different configurations: {'; '.join(different)}"
            )


def port_of(config: Mapping[str, Any] | None, environ: Mapping[str, str]) -> int | None:
    """Returns the port of rank 0 that a configuration has, whatever else is in it.

    Raises:
        SMPConfigurationError: it is none.
    """
    from_environment = _from_environment(environ)
    given = {**(config if isinstance(config, Mapping) else {}), **from_environment}
    port: int | None = given.get("ddp_port")
    _check_value(_BY_NAME["ddp_port"], port, _place("ddp_port", from_environment))
    return port


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(ENVIRONMENT_VARIABLE, "")
    if not text:
        return {}
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise SMPConfigurationError(f"{ENVIRONMENT_VARIABLE} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise SMPConfigurationError(f"{ENVIRONMENT_VARIABLE} must hold a JSON object, not {text}")
    return values


def _place(name: str, from_environment: Mapping[str, Any]) -> str:
    return ENVIRONMENT_VARIABLE if name in from_environment else "smp.init"


def _check_value(key: Key, value: Any, place: str) -> None:
    right, text = _CHECKS[key.kind]
    if value is None and key.default is None:
        return
    if not right(key, value):
        values = list(key.values)
        if key.name == "placement_strategy":
            values = [*values[:2], "a permutation of the letters D, P and T"]
        raise SMPConfigurationError(
            f"{text.format(name=key.name, value=value, values=values)} The configuration ({place}) "
            f"has {key.name!r}: {value!r}"
        )


def _check_together(known: Mapping[str, Any]) -> None:
    """Checks the rules between keys.

    Args:
        known: the keys that were given, without defaults.
    """
    partitions, degree = known.get("partitions"), known.get("pipeline_parallel_degree")
    if partitions is not None and degree is not None and partitions != degree:
        raise SMPConfigurationError(
            f"partitions ({partitions}) and pipeline_parallel_degree ({degree}) mean the same; "
            "set one of them."
        )
    count = degree or partitions or 1
    if known.get("auto_partition") is False and known.get("default_partition") is None:
        raise SMPConfigurationError(
            "default_partition must be supplied if auto_partition is set to False!"
        )
    default = known.get("default_partition")
    if default is not None and default >= count:
        raise SMPConfigurationError("default_partition must be less than the number of partitions!")
    for name in ("ddp_port", "ddp_dist_backend"):
        if name in known and "ddp" not in known:
            raise SMPConfigurationError(f"`{name}` needs `ddp` to be set as well")
    ddp = known.get("ddp", False)
    if known.get("horovod", False) and ddp:
        raise SMPConfigurationError("'ddp' and 'horovod' cannot be simultaneously enabled.")
    if known.get("load_partition") and not known.get("partition_file"):
        raise SMPConfigurationError("load_partition needs partition_file.")
    if known.get("fp16") and known.get("bf16"):
        raise SMPConfigurationError(
            "fp16 and bf16 cannot be simultaneously enabled. Set one of them."
        )
    sharded = known.get("sharded_data_parallel_degree", 1) > 1
    if known.get("bf16") and not sharded:
        raise SMPConfigurationError(
            "bf16 needs sharded_data_parallel_degree greater than 1: set that, or use fp16."
        )
    if known.get("tensor_parallel_degree", 1) > 1 and not ddp:
        raise SMPConfigurationError(
            "tensor_parallel_degree greater than 1 needs ddp: set ddp to True."
        )
    if sharded:
        if not ddp:
            raise SMPConfigurationError(
                "sharded_data_parallel_degree greater than 1 needs ddp: set ddp to True."
            )
        if known.get("shard_optimizer_state"):
            raise SMPConfigurationError(
                "sharded_data_parallel_degree greater than 1 and shard_optimizer_state exclude "
                "each other: leave out shard_optimizer_state, because sharding divides the "
                "optimizer's state, too."
            )


def _complete(values: dict[str, Any], known: Mapping[str, Any]) -> None:
    """Sets the defaults that depend on other keys, in `values`."""
    count = values["pipeline_parallel_degree"] or values["partitions"] or 1
    values["pipeline_parallel_degree"] = values["partitions"] = count
    if values["active_microbatches"] is None:
        # The simple pipeline begins all microbatches before the first backward pass.
        least = values["microbatches"] if values["pipeline"] == "simple" else 0
        values["active_microbatches"] = max(count + 2, least)
    if values["memory_weight"] is None:
        values["memory_weight"] = 0.8 if values["optimize"] == "memory" else 0.2
    if values["default_partition"] is None:
        values["default_partition"] = 0
    placement = values["placement_strategy"]
    values["placement_strategy"] = {"cluster": "DPT", "spread": "TPD"}.get(placement, placement)


def _say_what_is_missing(values: Mapping[str, Any]) -> None:
    """Warns of each feature that is configured and that this version does not have."""
    for key in KEYS:
        value = values[key.name]
        asked = value in key.asking if key.asking else value != key.default
        if key.instead and asked:
            warn_user(key.missing(f"{key.name}={value!r}"))


def _say_what_has_no_effect(values: Mapping[str, Any]) -> None:
    """Warns of keys of sharded data parallelism that are set without it."""
    if values["sharded_data_parallel_degree"] > 1:
        return
    for key in KEYS:
        if key.name.startswith("sdp_") and values[key.name] != key.default:
            warn_user(
                f"smp: {key.name}={values[key.name]!r} has no effect: set "
                "sharded_data_parallel_degree greater than 1"
            )
