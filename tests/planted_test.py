"""Planted faults on three kinds of tree are found and named; healthy trees of every scheme are not accused."""

from pathlib import Path

import pytest

from benchmarks import faults

PAGE = Path(__file__).parents[1] / "docs" / "faults.md"


@pytest.mark.slow
def test_every_planted_fault_is_found_and_named():
    outcomes = list(faults.faults())
    assert not [(o.name, o.kind, o.said) for o in outcomes if not o.found]
    assert len(outcomes) == 3 * len(faults.NAMES)
    assert len(faults.NAMES) >= 30


@pytest.mark.slow
def test_no_healthy_tree_is_accused():
    assert faults.accusations(200) == []


def test_the_page_has_every_fault():
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text(encoding="utf-8").splitlines()[8:]]
    assert tuple(row for row in rows if row) == faults.NAMES
    assert "MISSED" not in PAGE.read_text(encoding="utf-8")
