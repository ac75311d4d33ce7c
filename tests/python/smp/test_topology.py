"""Ranks and groups: the examples of the guide, and the relations between sizes."""

from __future__ import annotations

import pytest

from smddp.modelparallel.core.errors import SMPInitializationError
from smddp.modelparallel.core.topology import Topology


def topology(rank: int, size: int, pp: int, tp: int, placement: str) -> Topology:
    return Topology(rank, size, rank, size, pp, tp, placement)


@pytest.mark.parametrize(
    ("placement", "rank", "place"),
    [
        ("DPT", 1, {"D": 0, "P": 0, "T": 1}),
        ("DPT", 2, {"D": 0, "P": 1, "T": 0}),
        ("DPT", 4, {"D": 1, "P": 0, "T": 0}),
        ("PTD", 1, {"D": 1, "P": 0, "T": 0}),
        ("PTD", 2, {"D": 0, "P": 0, "T": 1}),
        ("PTD", 4, {"D": 0, "P": 1, "T": 0}),
    ],
)
def test_rightmost_letter_varies_fastest(placement: str, rank: int, place: dict) -> None:
    assert topology(0, 8, 2, 2, placement).coordinates(rank) == place


def test_spread_and_cluster() -> None:
    assert topology(0, 8, 2, 1, "TPD").groups("mp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert topology(0, 8, 2, 1, "DPT").groups("mp") == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_table_of_the_guide() -> None:
    place = topology(2, 8, 2, 2, "DTP")
    assert place.coordinates(2) == {"D": 0, "P": 0, "T": 1}
    assert (place.rank_in("mp"), place.rank_in("dp")) == (2, 1)


@pytest.mark.parametrize("placement", ["DPT", "DTP", "PDT", "PTD", "TDP", "TPD"])
@pytest.mark.parametrize(("size", "pp", "tp"), [(8, 2, 2), (8, 4, 1), (6, 3, 2), (4, 1, 1)])
def test_identities(placement: str, size: int, pp: int, tp: int) -> None:
    for rank in range(size):
        place = topology(rank, size, pp, tp, placement)
        sizes = {kind: place.size_of(kind) for kind in ("mp", "dp", "tp", "pp", "rdp")}
        assert sizes["pp"] * sizes["tp"] * sizes["rdp"] == size
        assert sizes["mp"] * sizes["rdp"] == sizes["pp"] * sizes["dp"] == size
        assert set(place.members("tp")) <= set(place.members("dp")) & set(place.members("mp"))
        for kind in sizes:
            assert place.members(kind)[place.rank_in(kind)] == rank
            assert sum(len(group) for group in place.groups(kind)) == size


def test_sizes_must_fit() -> None:
    with pytest.raises(SMPInitializationError, match="6 ranks cannot be divided"):
        topology(0, 6, 4, 1, "DPT")
