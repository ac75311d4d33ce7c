"""Models that are divided over ranks with a device: here the device made of threads."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import device_cases
import pytest
import torch
import torch.distributed as dist
from ranks import check_ranks
from smp import test_activations, test_transparency, zoo

from smddp.modelparallel.activations import offload
from smddp.modelparallel.common import device

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(device_cases.find_fake() is None, reason="the C++ tests were not built"),
]

# The others need operations that the device lacks, such as convolutions.
NAMES = ["mlp", "encoder-decoder", "mixture of experts", "recursive", "siamese", "parametrized"]
NAMES += ["frozen", "loose ends", "shared layer"]


def divided(config: dict[str, Any], names: list[str] = NAMES) -> dict[str, Any]:
    """As in test_transparency, on the device; returns states in host memory."""
    there = device_cases.Fake()
    dist.init_process_group(there.backend, timeout=timedelta(seconds=60))
    device.current = lambda: there.device
    zoo.device = lambda: there.device
    test_transparency.device = zoo.device
    # torch replaces parameters that it moves to such a device; smp keeps those of optimizers.
    make = test_transparency.make
    test_transparency.make = lambda name: make(name).to(there.device)
    results = test_transparency.divided(config, names)
    for name, (losses, state, owners) in results.items():
        assert all(value.device.type == "fake" for value in state.values()), name
        results[name] = losses, {key: value.cpu() for key, value in state.items()}, owners
    there.finish()
    return results


# Those of NAMES whose modules test_activations marks.
MARKED = ["mlp", "encoder-decoder", "parametrized", "shared layer"]


def offloaded() -> dict[str, Any]:
    """As `divided`, with activation checkpointing and offload; returns states in host memory."""
    there = device_cases.Fake()
    dist.init_process_group(there.backend, timeout=timedelta(seconds=60))
    device.current = lambda: there.device
    make = test_activations.make
    test_activations.make = lambda name: make(name).to(there.device)
    test_activations.device = lambda: there.device
    offload._SMALL = 0
    config = {"partitions": 2, "offload_activations": True, "activation_loading_horizon": 1}
    moved = []
    move_out = offload._HostMemory.move_out
    offload._HostMemory.move_out = lambda *args: moved.append(1) or move_out(*args)
    results = test_activations.divided({**config, "pipeline": "simple"}, MARKED)
    assert moved
    states = {
        name: {key: value.cpu() for key, value in state.items()} for name, state in results.items()
    }
    there.finish()
    return states


@pytest.mark.timeout(170)
def test_activations_leave_a_device() -> None:
    ranks = check_ranks(offloaded, "2", timeout=160)
    for name in MARKED:
        _, state = test_transparency.whole(name, 1)
        for states in ranks:
            torch.testing.assert_close(states[name], state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("pp", "replicas"), [(2, 1), (2, 2)])
@pytest.mark.timeout(170)
def test_divided_models_learn_the_same_on_a_device(pp: int, replicas: int) -> None:
    ranks = check_ranks(divided, str(pp * replicas), {"partitions": pp}, timeout=160)
    for name in NAMES:
        losses, state = test_transparency.whole(name, replicas)
        for found_losses, found_state, owners in (result[name] for result in ranks[:pp]):
            assert len(owners) == pp, name
            torch.testing.assert_close(found_state, state, rtol=1e-5, atol=1e-6)
            assert found_losses == pytest.approx(losses, abs=1e-6), name


def test_sharded_models_learn_the_same_on_a_device() -> None:
    names = [name for name in NAMES if name != "mixture of experts"]  # other control flow each
    sdp = {"sdp_param_persistence_threshold": 20, "sdp_gradient_clipping": 1e9}
    config = {"partitions": 1, "sharded_data_parallel_degree": 2, **sdp}
    ranks = check_ranks(divided, "2", config, names)
    for name in names:
        losses, state = test_transparency.whole(name, 2)
        found_losses, found_state, _ = ranks[0][name]
        torch.testing.assert_close(found_state, state, rtol=1e-5, atol=1e-6)
        assert found_losses == pytest.approx(losses, abs=1e-6), name
