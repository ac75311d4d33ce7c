"""Sums that travel in fewer bytes between nodes: SMDDP_WIRE and GroupOptions(wire=...)."""

from __future__ import annotations

import os
import re

import pytest
import ranks
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from test_tuning import Failure, failure_of

import smddp

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["1+1", "2x2", "3x1", "2+1"])
wires = pytest.mark.parametrize("wire", ["bf16", "int8"])

# What one encoding may be off, relative to the largest magnitude around: half a step of 1/127 of
# it, or of the last of 8 bits of a number; and a little for the rounding in float32.
_STEP = {"bf16": 2.0**-8 * 1.001, "int8": 0.5 / 127 * 1.001}
_SUM, _AVG, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


def _vector(count: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * count + rank)
    return torch.randn(count, generator=generator)


def _require_close(
    result: torch.Tensor, vectors: list[torch.Tensor], step: float, divisor: int
) -> None:
    """Each contribution is encoded at most once, and the result once."""
    exact = torch.stack(vectors).double().sum(0) / divisor
    bound = step * (sum(float(v.abs().max()) for v in vectors) / divisor)
    bound += step * (float(exact.abs().max()) + bound) + 1e-6
    assert float((result - exact).abs().max()) <= bound


def _require_equal_everywhere(tensor: torch.Tensor) -> None:
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, tensor)
    for other in everybody:
        assert torch.equal(other.view(torch.int32), tensor.view(torch.int32))


def _sums(wire: str, nodes: list[int]) -> None:
    os.environ["SMDDP_WIRE"] = wire
    dist.init_process_group("smddp")
    size, me = dist.get_world_size(), dist.get_rank()
    for count in (2049, 5000, 65_537, 700_001):
        vectors = [_vector(count, rank) for rank in range(size)]
        for op, divisor in ((_SUM, 1), (_AVG, size)):
            results = []
            for memory in (torch.empty, smddp.empty, torch.empty):
                tensor = memory(count)
                tensor.copy_(vectors[me])
                dist.all_reduce(tensor, op)
                _require_close(tensor, vectors, _STEP[wire], divisor)
                _require_equal_everywhere(tensor)
                results.append(tensor)
            # From run to run, and wherever the tensor lies.
            assert torch.equal(results[0], results[2])
            assert torch.equal(results[0], results[1])
    # It was encoded: the network has carried about a half, or a quarter.
    used = smddp.statistics()["allreduce/direct"]
    plain = used["bytes"] * 2 * (1 - 1 / len(nodes)) / min(nodes)
    assert used["fabric_bytes"] < {"bf16": 0.51, "int8": 0.27}[wire] * plain
    dist.destroy_process_group()


@layouts
@wires
def test_sums_are_close_and_equal_everywhere(layout: str, wire: str) -> None:
    ranks.check_ranks(_sums, layout, wire, ranks.nodes_of(layout))


@layouts
@pytest.mark.parametrize("wire", ["bf16", "int8", "int8+feedback"])
@on_ranks("{layout}")
def test_reduces_and_reduce_scatters_are_close(layout: str, wire: str) -> None:
    os.environ["SMDDP_WIRE"] = wire
    dist.init_process_group("smddp")
    size, me = dist.get_world_size(), dist.get_rank()
    step = _STEP[wire.removesuffix("+feedback")]
    for count in (2049, 70_001):
        vectors = [_vector(count, rank) for rank in range(size)]
        for op, divisor in ((_SUM, 1), (_AVG, size)):
            for root in range(size):
                tensor = vectors[me].clone()
                dist.reduce(tensor, root, op)
                if me == root:
                    _require_close(tensor, vectors, step, divisor)
                else:
                    assert torch.equal(tensor, vectors[me])
            for memory in (torch.empty, smddp.empty):
                given = memory(size * count)
                given.copy_(torch.cat([_vector(count, size * me + block) for block in range(size)]))
                output = memory(count)
                dist.reduce_scatter_tensor(output, given, op)
                mine = [_vector(count, size * rank + me) for rank in range(size)]
                _require_close(output, mine, step, divisor)
    # On an uneven layout a rank may have no peer on other nodes. Rank 0 always has one.
    for name in ("reduce/direct", "reduce_scatter/direct"):
        assert me != 0 or smddp.statistics()[name]["fabric_bytes"] > 0
    dist.destroy_process_group()


def _reduce_scatter_bytes(wire: str) -> int:
    os.environ["SMDDP_WIRE"] = wire
    dist.init_process_group("smddp")
    given = torch.ones(dist.get_world_size() * 50_000)
    dist.reduce_scatter_tensor(torch.empty(50_000), given)
    moved = smddp.statistics()["reduce_scatter/direct"]["fabric_bytes"]
    dist.destroy_process_group()
    return moved


def test_a_reduce_scatter_sends_fewer_bytes() -> None:
    fp32, bf16, int8 = (
        sum(ranks.check_ranks(_reduce_scatter_bytes, "2x2", wire))
        for wire in ("fp32", "bf16", "int8")
    )
    assert fp32 == 2 * bf16
    assert 3.9 * int8 < fp32


def _many_sums_of_the_same(wire: str, collective: str) -> float:
    """Returns how far the sum of all results is off, in errors that one result may have."""
    os.environ["SMDDP_WIRE"] = wire
    dist.init_process_group("smddp")
    size, me = dist.get_world_size(), dist.get_rank()
    count, rounds = 20_000, 100
    vectors = [_vector(count, rank) for rank in range(size)]
    exact = torch.stack(vectors).double().sum(0) / size
    total = torch.zeros(count, dtype=torch.float64)
    scattered = collective == "reduce_scatter"
    given, output = torch.empty(size * count if scattered else count), torch.empty(count)
    for _ in range(rounds):
        given.copy_(vectors[me].repeat(size) if scattered else vectors[me])
        if scattered:
            dist.reduce_scatter_tensor(output, given, _AVG)
        elif collective == "reduce":
            dist.reduce(given, 0, _AVG)
        else:
            dist.all_reduce(given, _AVG)
        total += output if scattered else given
    dist.destroy_process_group()
    if collective == "reduce" and me != 0:
        return 0.0
    step = _STEP[wire.removesuffix("+feedback")]
    bound = step * sum(float(v.abs().max()) for v in vectors) / size
    bound += step * (float(exact.abs().max()) + bound)
    return float((total - rounds * exact).abs().max()) / bound


@pytest.mark.parametrize("layout", ["1+1", "2x2", "3x1"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_with_feedback_errors_do_not_add_up(layout: str, collective: str) -> None:
    """What one sum loses is in the next one, so the sum of all results loses only the last."""
    for wire in ("bf16", "int8"):
        without = ranks.check_ranks(_many_sums_of_the_same, layout, wire, collective)
        assert max(without) > 10
        fed_back = ranks.check_ranks(_many_sums_of_the_same, layout, wire + "+feedback", collective)
        assert max(fed_back) < 1.1


def _feedback_of_several_tensors() -> float:
    os.environ["SMDDP_WIRE"] = "int8+feedback"
    dist.init_process_group("smddp")
    size, me = dist.get_world_size(), dist.get_rank()
    counts, rounds = [3000, 77, 20_000], 50
    given = [torch.empty(count) for count in counts]
    total = torch.zeros(sum(counts), dtype=torch.float64)
    for _ in range(rounds):
        for tensor, count in zip(given, counts, strict=True):
            tensor.copy_(_vector(count, me))
        with dist.distributed_c10d._coalescing_manager(dist.group.WORLD):
            for tensor in given:
                dist.all_reduce(tensor)
        total += torch.cat(given)
    exact = torch.cat(
        [torch.stack([_vector(n, r) for r in range(size)]).double().sum(0) for n in counts]
    )
    dist.destroy_process_group()
    return float((total - rounds * exact).abs().max())


def test_feedback_of_a_vector_of_several_tensors() -> None:
    for error in ranks.check_ranks(_feedback_of_several_tensors, "2x2"):
        assert error < 1.1 * _STEP["int8"] * 2 * 4 * 5


def _one_memory_in_two_orders() -> float:
    """Returns the largest error in the rows of small numbers."""
    os.environ["SMDDP_WIRE"] = "bf16+feedback"
    dist.init_process_group("smddp")
    size = dist.get_world_size()
    given = _vector(512 * 512, 0).reshape(512, 512)
    given[:256] *= 1e3
    given[256:] *= 1e-3
    tensor = torch.empty_like(given)
    worst = 0.0
    for i in range(6):
        tensor.copy_(given)
        dist.all_reduce(tensor.t() if i % 2 else tensor)
        worst = max(worst, float((tensor - size * given)[256:].abs().max()))
    dist.destroy_process_group()
    return worst / (1e-3 * float(_vector(512 * 512, 0).abs().max()))


def test_feedback_goes_to_the_element_that_lost_it() -> None:
    for error in ranks.check_ranks(_one_memory_in_two_orders, "1+1"):
        assert error < 4 * 2 * _STEP["bf16"]


def _tensors_that_do_not_last() -> None:
    os.environ["SMDDP_WIRE"] = "int8+feedback"
    dist.init_process_group("smddp")
    size, me = dist.get_world_size(), dist.get_rank()
    for i in range(40):
        # Large ones, then small ones: what the large ones have lost must not get into these.
        vectors = [_vector(5000, rank + i) * (1e6 if i < 20 else 1e-6) for rank in range(size)]
        tensor = vectors[me].clone()
        dist.all_reduce(tensor)
        unit = vectors[0].abs().max()
        scaled = [v / unit for v in vectors]
        _require_close(tensor / unit, scaled, _STEP["int8"], 1)
    dist.destroy_process_group()


def test_feedback_is_dropped_with_its_tensor() -> None:
    for outcome in ranks.run_ranks(_tensors_that_do_not_last, "1+1"):
        assert outcome.returned, outcome
        assert outcome.stderr.count("error feedback has no effect here") == 1


def _automatic(wire: str, nodes: list[int]) -> str:
    dist.init_process_group("smddp")
    group = dist.new_group(backend="smddp", pg_options=smddp.GroupOptions(wire=wire))
    assert isinstance(group, dist.ProcessGroup)
    size, me = dist.get_world_size(), dist.get_rank()
    vectors = [_vector(10_000, rank) for rank in range(size)]
    tensor = vectors[me].clone()
    dist.all_reduce(tensor, group=group)
    _require_close(tensor, vectors, _STEP["int8"], 1)
    text = smddp.describe(group)
    dist.destroy_process_group()
    return text


@pytest.mark.parametrize("wire", ["auto", "auto+feedback"])
@pytest.mark.parametrize("layout", ["2x2", "3x1"])
def test_auto_chooses_one_format_for_all(layout: str, wire: str) -> None:
    outcomes = ranks.run_ranks(_automatic, layout, wire, ranks.nodes_of(layout))
    assert all(outcome.returned for outcome in outcomes), outcomes
    found = {re.search(r", (\w+)[\w ]* between nodes \(auto\)", each.value) for each in outcomes}
    chosen = {match[1] for match in found if match}
    assert len(chosen) == 1
    assert chosen <= {"fp32", "bf16", "int8"}
    said = [each.stderr.count(f"sends {min(chosen)} between nodes") for each in outcomes]
    assert said == [1] + [0] * (len(outcomes) - 1)


def _ring() -> str:
    with ranks.job():
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [2.0]
        return smddp.describe()


def test_auto_is_fp32_where_the_algorithm_knows_nothing_else() -> None:
    env = {"SMDDP_WIRE": "auto", "SMDDP_ALGORITHM": "allreduce=ring"}
    outcomes = ranks.run_ranks(_ring, "1+1", env=env)
    for outcome in outcomes:
        assert outcome.returned, outcome
        assert "fp32 between nodes (auto)" in outcome.value
    assert (
        'group "0" sends fp32 between nodes: with SMDDP_ALGORITHM=allreduce=ring no other format '
        "is possible"
    ) in outcomes[0].stderr


def test_auto_measures_nothing_inside_a_node() -> None:
    for outcome in ranks.run_ranks(_automatic, "2", "auto", [2]):
        assert "between nodes" not in outcome.value + outcome.stderr


@wires
@on_ranks("2x2")
def test_a_vector_of_several_tensors(wire: str) -> None:
    os.environ["SMDDP_WIRE"] = wire
    dist.init_process_group("smddp")
    size, me = dist.get_world_size(), dist.get_rank()
    counts = [1, 3000, 77, 20_000, 5]
    tensors = [_vector(count, me) for count in counts]
    with dist.distributed_c10d._coalescing_manager(dist.group.WORLD):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for count, tensor in zip(counts, tensors, strict=True):
        vectors = [_vector(count, rank) for rank in range(size)]
        exact = torch.stack(vectors).double().sum(0)
        # The largest magnitude of a block may be that of another tensor.
        assert float((tensor - exact).abs().max()) <= _STEP[wire] * 8 * (size + 1)
        _require_equal_everywhere(tensor)
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["1+1", "2x2"])
@on_ranks("{layout}")
def test_everything_else_travels_as_it_is(layout: str) -> None:
    os.environ["SMDDP_WIRE"] = "int8"
    dist.init_process_group("smddp")
    size, me = dist.get_world_size(), dist.get_rank()
    total = size * (size + 1) // 2
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        tensor = torch.full((10_000,), 1 + me, dtype=dtype)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((10_000,), total, dtype=dtype))
    tensor = torch.full((10_000,), 1.1 + me)
    dist.all_reduce(tensor, _MAX)
    assert torch.equal(tensor, torch.full((10_000,), 1.1 + size - 1))
    # Up to 8 KiB, and collectives that sum nothing.
    for count in (1, 2048):
        tensor = torch.full((count,), 0.3)
        dist.all_reduce(tensor)
        expected = torch.full((count,), 0.3)
        for _ in range(size - 1):
            expected += 0.3
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=0)
    given = torch.linspace(0, 1, 10_000)
    tensor = given * me
    dist.broadcast(tensor, 1)
    assert torch.equal(tensor, given)
    dist.destroy_process_group()


@on_ranks("2")
def test_nothing_is_encoded_inside_a_node() -> None:
    os.environ["SMDDP_WIRE"] = "int8"
    dist.init_process_group("smddp")
    tensor = _vector(50_000, dist.get_rank())
    dist.all_reduce(tensor)
    assert torch.equal(tensor, _vector(50_000, 0) + _vector(50_000, 1))
    dist.destroy_process_group()


@on_ranks("1+1")
def test_infinities_and_nans_arrive() -> None:
    os.environ["SMDDP_WIRE"] = "int8"
    dist.init_process_group("smddp")
    me = dist.get_rank()
    tensor = torch.zeros(10_000)
    if me == 1:
        tensor[10], tensor[300], tensor[9_000] = float("inf"), float("-inf"), float("nan")
    tensor[600] = 1 + me
    dist.all_reduce(tensor)
    assert tensor[10] == float("inf")
    assert tensor[300] == float("-inf")
    assert torch.isnan(tensor[9_000])
    assert int(tensor.isfinite().sum()) == 9_997
    assert int(tensor.count_nonzero()) == 4
    assert abs(float(tensor[600]) - 3) <= 3 * _STEP["int8"] * 2
    dist.destroy_process_group()


def _groups() -> tuple[str, list[int]]:
    dist.init_process_group("smddp")
    moved = []
    for wire in ("int8", "bf16", "fp32", ""):
        group = dist.new_group(backend="smddp", pg_options=smddp.GroupOptions(wire=wire))
        assert isinstance(group, dist.ProcessGroup)
        dist.all_reduce(torch.ones(100_000), group=group)
        moved.append(smddp.statistics(group)["allreduce/direct"]["fabric_bytes"])
        if wire == "int8":
            text = smddp.describe(group)
    dist.destroy_process_group()
    return text, moved


def test_a_group_with_a_wire_of_its_own() -> None:
    for text, (int8, bf16, fp32, default) in ranks.check_ranks(_groups, "1+1"):
        assert "int8 between nodes" in text
        assert fp32 == default == 2 * bf16 == 400_000
        assert int8 < 0.26 * fp32


def _another_algorithm() -> Failure:
    os.environ.update(SMDDP_WIRE="int8", SMDDP_ALGORITHM="allreduce=ring")
    dist.init_process_group("smddp")
    dist.all_reduce(torch.ones(100))  # short: it travels as it is, and ring can serve it
    return failure_of(lambda: dist.all_reduce(torch.ones(10_000)))


def test_an_algorithm_that_cannot_encode_is_named() -> None:
    for failure in ranks.check_ranks(_another_algorithm, "1+1"):
        assert failure.kind == "ValueError"
        assert (
            "on 2 node(s) that travels as int8; add to it direct, or let it travel as fp32"
            in failure.text
        )


def _wrong(options: list[str], variable: str) -> Failure:
    if variable:
        os.environ["SMDDP_WIRE"] = variable
        return failure_of(lambda: dist.init_process_group("smddp"))
    dist.init_process_group("smddp")
    own = smddp.GroupOptions(wire=options[dist.get_rank()])
    return failure_of(lambda: dist.new_group(backend="smddp", pg_options=own))


def test_wrong_wires_are_refused() -> None:
    for failure in ranks.check_ranks(_wrong, "1+1", ["int4", "int4"], ""):
        assert failure.kind == "ValueError"
        assert "wire=int4: write fp32, bf16, int8 or auto" in failure.text
    for failure in ranks.check_ranks(_wrong, "1+1", ["fp32+feedback"] * 2, ""):
        assert "fp32 loses nothing" in failure.text
    for failure in ranks.check_ranks(_wrong, "1+1", ["int8", "fp32"], ""):
        assert (
            "the group must be made with the same GroupOptions (algorithm and wire)" in failure.text
        )
    for failure in ranks.check_ranks(_wrong, "1+1", [], "int4"):
        assert "SMDDP_WIRE" in failure.text
        assert "expects fp32, bf16, int8, auto" in failure.text
    with pytest.raises(TypeError, match='wire is text such as "int8"'):
        smddp.GroupOptions(wire=8)  # type: ignore[arg-type]
