"""What the benchmarks say of their figures: targets, the comparison of two runs, and the page made of them."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import compare, profile, speed
from benchmarks.harness import Costs, Race, read

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"


def race(ours, peak=2.0, bound=1.5):
    made = Race("a race", "M", 10.0, {})
    for a, b in zip(ours, (2.0, 2.0, 2.0)):
        made.add("ours", {"cpu_s": a, "wall_s": a, "peak_GB": peak})
        made.add("theirs", {"cpu_s": b, "wall_s": b})
    made.target("times the speed of theirs", made.ratio("theirs", "ours"), at_least=bound)
    return made


def test_ratios_are_taken_round_by_round_and_targets_are_judged():
    made = race([1.0, 0.5, 4.0])
    assert made.ratio("theirs", "ours") == 2.0
    assert made.targets[0].met
    assert not race([2.0, 2.0, 2.0]).targets[0].met
    columns, rows = made.rows()
    assert rows[0][columns.index("M / CPU-s")] == "10"
    assert rows[0][columns.index("peak GB")] == "2"


def test_a_case_may_measure_itself():
    made = Race(
        "", "", 0, {"a": lambda: Costs(cpu_s=3.0), "b": lambda: Costs(bytes=7.0), "c": lambda: {"cpu_s": 1}}
    ).run(2)
    assert made.samples["a"] == {"cpu_s": [3.0, 3.0]}
    assert set(made.samples["b"]) == {"bytes", "cpu_s", "wall_s"}
    assert made.median("c") < 1


def test_a_regression_is_marked_and_noise_is_not(tmp_path, capsys):
    for name, made in (
        ("a", race([1.0, 1.0, 1.1])),
        ("b", race([1.0, 1.05, 1.2])),
        ("c", race([1.5, 1.6, 1.5], peak=1.0)),
    ):
        made.write(tmp_path / f"{name}.json")
    a, b, c = (str(tmp_path / f"{name}.json") for name in "abc")
    assert read(a)[0].rows() == race([1.0, 1.0, 1.1]).rows()
    assert compare.main(a, b) == 0
    assert compare.main(a, c) == 1
    out = capsys.readouterr().out
    assert len(re.findall("REGRESSION", out)) == 2  # the CPU-seconds, and the target that they met
    assert re.search(r"peak_GB +2 +1 +0.500 +less", out)
    assert compare.main(c, a) == 1  # more memory


def test_two_benchmarks_without_a_common_case_are_refused(tmp_path):
    race([1.0, 1.0, 1.0]).write(tmp_path / "a" / "init.json")
    race([1.0, 1.0, 1.0]).write(tmp_path / "b" / "train.json")
    with pytest.raises(SystemExit, match="no benchmark in common"):
        compare.main(str(tmp_path / "a"), str(tmp_path / "b"))


def test_operations_are_told_apart_by_what_they_were_traced_from():
    inside = "jit(step)/layers_0/mlp_residual"
    text = f"""
%fused_computation.1 (p: f32[8,8]) -> f32[8,8] {{
  ROOT %dot.1 = f32[8,8]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}}
}}

ENTRY %main (a: f32[8,8]) -> f32[8,8] {{
  %f.1 = f32[8,8]{{1,0}} fusion(%a), calls=%fused_computation.1, metadata={{op_name="{inside}/mlp/dot_general"}}
  ROOT %n.1 = f32[8,8]{{1,0}} fusion(%f.1), calls=%other, metadata={{op_name="{inside}/mlp_residual.normed/norm/mul"}}
}}
"""
    known = profile.names(text)
    assert [known[k][0] for k in ("f.1", "n.1")] == ["dot", "fusion"]
    rows = profile.summed({"f.1": 2e-3, "n.1": 1e-3}, known)
    assert rows == {"MLP": {"products_ms": 2.0, "rest_ms": 0.0}, "norms": {"products_ms": 0.0, "rest_ms": 1.0}}


def test_the_page_has_the_newest_figures():
    text = PAGE.read_text(encoding="utf-8")
    assert speed.filled(text) == text
    for path in speed.newest().values():
        assert json.loads(path.read_text())["samples"]
