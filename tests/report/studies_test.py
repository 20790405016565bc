"""The pages that are made from measurements are those that the measurements make, and their words fit the figures."""

import re
from pathlib import Path

import pytest

from benchmarks import numbers, pages

DOCS = Path(__file__).parents[2] / "docs"
MADE = pages.pages()


@pytest.mark.parametrize("name", MADE)
def test_a_page_is_not_stale(name):
    assert (DOCS / name).read_text(encoding="utf-8") == MADE[name], "stale: run python -m benchmarks.pages docs"
    for target in re.findall(r"\]\(([^)#]+)\)", MADE[name]):
        assert (DOCS / target).exists(), target
    assert not re.search(r"\bnan\b|\binf\b|None", MADE[name])


def test_every_verdict_still_fits_its_figures():
    figures = numbers.Figures.read()
    claims = [*numbers.forward(figures), *numbers.backward(figures), *numbers.schemes(figures)]
    assert len(claims) >= 20
    assert [c.claim for c in claims if not c.held] == []


def test_a_verdict_notices_other_figures():
    figures = numbers.Figures.read()
    for row in figures.rows("rezero", 100):
        row["variance"][-1] = 1.5
    assert "ReZero" in next(c.claim for c in numbers.schemes(figures) if not c.held)
