"""What the `distribution` of a SageMaker estimator asks for, for smddprun --distribution.

It is checked as SageMaker's SDK checks it. Its ranks get the variables by which scripts see there
how they were started.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
from collections.abc import Callable
from typing import Any

__all__ = ["plan_of_distribution", "read_distribution"]

# The keys that start ranks of PyTorch, and those below the first.
_STRATEGIES = ("smdistributed", "mpi", "pytorchddp", "torch_distributed")
_SMDISTRIBUTED = ["dataparallel", "modelparallel"]


def read_distribution(text: str) -> dict[str, Any]:
    """Returns the value of --distribution as a dict.

    Args:
        text: the `distribution` of a SageMaker estimator, in JSON or as Python writes it; or the
            name of a file that holds it.

    Raises:
        ValueError: it is neither.
        OSError: the file cannot be read.
    """
    place = "--distribution"
    if not text.lstrip().startswith(("{", "[")):
        place = f"--distribution {text}"
        try:
            with open(text, encoding="utf-8-sig") as file:
                text = file.read()
        except UnicodeDecodeError:
            raise ValueError(f"{place} is neither JSON nor a Python dict: it is no text") from None
    value = _value(text)
    if not isinstance(value, dict):
        raise ValueError(f"{place} is neither JSON nor a Python dict: {text.strip()[:60]!r}")
    return value


def _value(text: str) -> Any:
    """Returns the value of a text in JSON or in Python's notation, None if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        # A cell of a notebook has True where JSON has true. Tuples become lists, as in the SDK.
        return json.loads(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def plan_of_distribution(
    distribution: dict[str, Any],
    ranks: int | None = None,
    hosts: int = 1,
    instance_type: str | None = None,
) -> tuple[int | None, dict[str, str], list[str]]:
    """Returns what the `distribution` of a SageMaker estimator asks for, as SageMaker reads it.

    Args:
        distribution: of the estimator.
        ranks: of each host, as -n or the host file says; None if neither does.
        hosts: their number.
        instance_type: what the ranks are told about it, if anything.

    Returns:
        The number of ranks of each host, None if nothing says it; variables of the ranks; and
        those of custom_mpi_options that have no effect without mpirun.

    Raises:
        ValueError: a key or a value is wrong, or it has another number of ranks. Where the SDK
            refuses the same, the text is its own.
    """
    distribution = _checked(distribution)
    below = distribution.get("smdistributed", {})
    mpi, data_parallel = distribution.get("mpi", {}), below.get("dataparallel", {})
    model_parallel = below.get("modelparallel", {})
    torch_distributed = distribution.get("torch_distributed", {})
    # mpirun starts such a job in SageMaker, whatever else is enabled.
    by_mpi = _enabled(mpi)
    if by_mpi:
        asked = mpi.get("processes_per_host")
        if None not in (ranks, asked) and ranks != asked:
            raise ValueError(
                f"the distribution has processes_per_host {asked}, but -n or the host file asks "
                f"for {ranks} ranks"
            )
        ranks = ranks or asked or 1

    # The parameters from which the container, and so transformers, sees how a job was started.
    told: dict[str, Any] = {}
    if "mpi" in distribution:
        told["sagemaker_mpi_enabled"] = by_mpi
        if mpi.get("processes_per_host"):
            told["sagemaker_mpi_num_of_processes_per_host"] = mpi["processes_per_host"]
        told["sagemaker_mpi_custom_mpi_options"] = mpi.get("custom_mpi_options", "")
    if "smdistributed" in distribution:
        told["sagemaker_distributed_dataparallel_enabled"] = _enabled(data_parallel)
        if instance_type:
            told["sagemaker_instance_type"] = instance_type
        if _enabled(data_parallel):
            options = data_parallel.get("custom_mpi_options", "")
            told["sagemaker_distributed_dataparallel_custom_mpi_options"] = options
    if "torch_distributed" in distribution:
        told["sagemaker_torch_distributed_enabled"] = _enabled(torch_distributed)
    variables = {"SM_FRAMEWORK_PARAMS": _json(told)}
    if _enabled(model_parallel):
        parameters = _parameters(model_parallel.get("parameters", {}))
        variables["SM_HP_MP_PARAMETERS"] = _json(parameters)
    if _enabled(data_parallel) and not by_mpi:
        mode = "SINGLENODE" if hosts == 1 else "HOMOGENEOUS"
        variables[f"SMDATAPARALLEL_USE_{mode}"] = "1"
    exported, ignored = _options_of_mpirun(
        (mpi if by_mpi else data_parallel).get("custom_mpi_options", "")
    )
    return ranks, variables | exported, ignored


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _enabled(strategy: dict[str, Any]) -> bool:
    return strategy.get("enabled", False) is True


def _checked(distribution: dict[str, Any]) -> dict[str, Any]:
    """Returns a distribution whose keys are right; pytorchddp has become what the SDK makes of it.

    Raises:
        ValueError: a key or a value is wrong.
    """
    if wrong := [name for name in distribution if name not in _STRATEGIES]:
        raise ValueError(
            f"unknown distribution strategy {wrong[0]!r}: expects one of {', '.join(_STRATEGIES)}"
        )
    if "pytorchddp" in distribution:
        if "smdistributed" in distribution:
            raise ValueError(
                "Cannot use both pytorchddp and smdistributed distribution options together."
            )
        distribution = {
            **distribution,
            "smdistributed": {"dataparallel": distribution["pytorchddp"]},
        }
        del distribution["pytorchddp"]
    below = distribution.get("smdistributed", {})
    if not isinstance(below, dict):
        raise ValueError("smdistributed strategy requires a dictionary")
    if len(below) > 1:
        raise ValueError(
            "Cannot use more than 1 smdistributed strategy. Choose one of the following supported "
            f"strategies:{_SMDISTRIBUTED}"
        )
    if wrong := [name for name in below if name not in _SMDISTRIBUTED]:
        raise ValueError(
            f"Invalid smdistributed strategy provided: {wrong[0]} Supported strategies: "
            f"{_SMDISTRIBUTED}"
        )
    strategies = {**{k: v for k, v in distribution.items() if k != "smdistributed"}, **below}
    for name, strategy in strategies.items():
        _check_strategy(name, strategy)
    on = [name for name, strategy in strategies.items() if _enabled(strategy)]
    if "modelparallel" in on and "mpi" not in on:
        raise ValueError("Cannot use Model Parallelism without MPI enabled!")
    if not on:
        raise ValueError('the distribution enables no strategy: one needs "enabled": true')
    return distribution


def _check_strategy(name: str, strategy: Any) -> None:
    if not isinstance(strategy, dict):
        raise ValueError(f"{name} of the distribution must be a dictionary")
    allowed: dict[str, tuple[Callable[[Any], bool], str]] = {
        "enabled": (lambda v: isinstance(v, bool), "true or false")
    }
    if name in ("mpi", "dataparallel"):
        allowed["custom_mpi_options"] = (lambda v: isinstance(v, str), "a text")
    if name == "mpi":
        # bool is a kind of int.
        allowed["processes_per_host"] = (lambda v: type(v) is int and v > 0, "a positive integer")
    if name == "modelparallel":
        allowed["parameters"] = (lambda _: True, "")  # checked later, by other rules
    for key, value in strategy.items():
        if key not in allowed:
            raise ValueError(f"{name} has no key {key!r}: expects {', '.join(allowed)}")
        right, text = allowed[key]
        if not right(value):
            raise ValueError(f"{key} of {name} must be {text}, not {value!r}")


def _parameters(given: Any) -> dict[str, Any]:
    """Returns the configuration of smp.init, which may be in a file.

    Raises:
        ValueError: it is wrong.
    """
    found = given
    if not isinstance(given, dict):
        if not isinstance(given, str) or not os.path.exists(given):
            raise ValueError(
                "Expected a string path to an existing modelparallel config, or a dictionary. "
                f"Received: {given}."
            )
        try:
            with open(given, encoding="utf-8-sig") as file:
                found = json.load(file)
        except (OSError, ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"Cannot parse {given} as a json file.")
    # smp.init would raise the same in each rank.
    from smddp.modelparallel.core.config import configure
    from smddp.modelparallel.core.errors import SMPConfigurationError

    try:
        environ = {**os.environ, "SM_HP_MP_PARAMETERS": json.dumps(found)}
        configure(None, environ, warn=False)
    except SMPConfigurationError as error:
        raise ValueError(str(error)) from None
    parameters: dict[str, Any] = found
    return parameters


def _options_of_mpirun(text: str) -> tuple[dict[str, str], list[str]]:
    """Returns the variables that options of mpirun export, and the other options.

    Raises:
        ValueError: a quotation mark has no second one.
    """
    try:
        words: list[str] = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"custom_mpi_options {text!r}: {error}") from None
    exported: dict[str, str] = {}
    others: list[str] = []
    while words:
        word = words.pop(0)
        if word == "-x" and words:
            name, equals, value = words.pop(0).partition("=")
            # Without a value mpirun exports its own; ranks of torchrun inherit all variables.
            exported |= {name: value} if equals else {}
        elif word.startswith("--NCCL_DEBUG"):  # an option of SageMaker's toolkit itself
            _, equals, value = word.partition("=")
            exported["NCCL_DEBUG"] = value if equals or not words else words.pop(0)
        else:
            others.append(word)
    return exported, others
