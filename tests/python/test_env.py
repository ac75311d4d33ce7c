"""Settings: docs/settings.md matches the code, and misspelt variables cause a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import programs
import pytest

from smddp.tools import env
from smddp.torch._misspelt import misspelt

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("_no_settings")


def test_the_page_is_up_to_date() -> None:
    text = (ROOT / "docs/settings.md").read_text()
    assert env.insert(text, env.markdown(env.settings())) == text, (
        "run `smddp env --markdown docs/settings.md`"
    )


def test_a_misspelt_variable_gets_the_nearest_name() -> None:
    known = [row["name"] for row in env.settings()]
    said = misspelt({"SMDDP_PROVIDR": "tcp", "PATH": "/bin", known[0]: "x"}, known)
    assert said == ["SMDDP_PROVIDR is not a setting of smddp: did you mean SMDDP_PROVIDER?"]


def test_a_variable_like_no_other_points_to_the_list() -> None:
    (said,) = misspelt({"SMDDP_XYZZY_QUUX": "1"}, [row["name"] for row in env.settings()])
    assert said.endswith("see `smddp env`.")


def test_variables_of_the_original_library_are_not_misspelt() -> None:
    known = [row["name"] for row in env.settings()]
    original = {
        "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192",
        "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "8192",
        "SMDATAPARALLEL_OPTIMIZE_SDP": "true",
    }
    assert misspelt(original, known) == []
    (said,) = misspelt({"SMDDP_AG_SCRATCH_BUFFER_BYTES": "8192"}, known)
    assert "did you mean SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES?" in said


def test_insert_replaces_only_what_is_between_the_markers() -> None:
    text = f"before\n{env.BEGIN}\nold\n{env.END}\nafter\n"
    assert env.insert(text, "new\n") == f"before\n{env.BEGIN}\nnew\n{env.END}\nafter\n"
    with pytest.raises(ValueError, match="has no lines"):
        env.insert("nothing", "new\n")


def tool(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return programs.run("-m", "smddp.tools.env", *arguments, **variables)


def test_the_tool_shows_values_in_force() -> None:
    done = tool(SMDDP_FABRIC_WINDOW="7", SMDDP_FABRIC_WINDOWS="8")
    assert done.returncode == 0
    assert "SMDDP_FABRIC_WINDOW=7  (integer, from the environment)" in done.stdout
    assert "SMDDP_LOG=warn  (text, default)" in done.stdout
    assert "did you mean SMDDP_FABRIC_WINDOW?" in done.stderr


def test_numbers_have_their_limits() -> None:
    said = {row["name"]: row["doc"] for row in env.settings()}
    assert said["SMDDP_POOL_BYTES"].endswith(" At least 16384 bytes.")
    assert said["SMDDP_FABRIC_WINDOW"].endswith(" From 1 to 256 messages.")
    for name in ("SMDDP_FUSION_BYTES", "SMDDP_NODE_ID", "SMDDP_FABRIC_RMA"):
        assert not any(text in said[name] for text in (" At least ", " From ")), name


def test_the_tool_names_a_value_that_does_not_parse() -> None:
    done = tool(SMDDP_FABRIC_WINDOW="many")
    assert done.returncode == 1
    assert done.stderr.startswith("smddp env: ")
    assert "SMDDP_FABRIC_WINDOW=many is not a whole number" in done.stderr


def test_all_values_that_do_not_parse_are_named() -> None:
    wrong = {"SMDDP_FABRIC_WINDOW": "many", "SMDDP_LOG": "loud", "SMDDP_FABRIC_RMA": "perhaps"}
    done = tool(**wrong, SMDDP_LOGG="info")
    assert done.returncode == 1
    assert "SMDDP_LOGG is not a setting of smddp: did you mean SMDDP_LOG?" in done.stderr
    for given in ("SMDDP_FABRIC_WINDOW=many", "SMDDP_LOG=loud", "SMDDP_FABRIC_RMA=perhaps"):
        assert given in done.stderr


@pytest.mark.parametrize("module", ["smddp.tools.env", "smddp.tools.plan"])
def test_a_reader_who_leaves_early_is_no_trouble(module: str) -> None:
    arguments = ["list"] if module == "smddp.tools.plan" else []
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as tool:
        assert tool.stdout is not None
        tool.stdout.close()
        assert tool.stderr is not None
        assert tool.stderr.read() == ""
        assert tool.wait(110) == 1
