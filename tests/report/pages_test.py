"""The pages in docs/ are those that the data makes."""

import re
from pathlib import Path

import pytest

from deepinit.report import pages
from deepinit.schemes import disputes
from deepinit.schemes.registry import recipe, scheme_names, schemes

DOCS = Path(__file__).parents[2] / "docs"
MADE = pages.pages()
AGAIN = "stale: run python -m deepinit.report.pages docs"


@pytest.mark.parametrize("path", MADE)
def test_a_page_is_not_stale(path):
    assert (DOCS / path).read_text(encoding="utf-8") == MADE[path], AGAIN


def test_there_is_a_page_for_every_scheme_and_no_other():
    assert {p.stem for p in (DOCS / "schemes").glob("*.md")} == {*scheme_names(), "README"}, AGAIN


@pytest.mark.parametrize("scheme", schemes(), ids=scheme_names())
def test_a_page_says_what_it_should(scheme):
    text = MADE[f"schemes/{scheme.name}.md"]
    for part in ("## Residual rule", "## Weights", "## Use", scheme.source):
        assert part in text
    assert ("No second source" in text) == (not scheme.verified)
    assert ("## Options" in text) == bool(scheme.hyperparameters)
    assert ("## What is disputed" in text) == bool(disputes.about(scheme.name))
    assert all(f"`{alias}`" in text for alias in scheme.aliases)
    assert not re.search(r"\| nan \|", text)


def test_the_numbers_are_the_recipe_s():
    g = next(iter(pages.GEOMETRIES.values()))
    std = recipe("deepnorm", g).weights["attn_out"].std
    row = next(line for line in MADE["schemes/deepnorm.md"].splitlines() if line.startswith("| `attn_out`"))
    assert f"{std:.6g}" in row
    assert "2.213 x" in MADE["schemes/deepnorm.md"]
    roles = "`attn_q` `attn_k` `attn_v` `attn_out` `mlp_gate` `mlp_up` `mlp_down`"
    assert f"| {roles} | 0.333333 | 3 | 0.0555556 |" in MADE["schemes/completep.md"]


def test_text_reads_as_text():
    for path, text in MADE.items():
        assert "&" not in re.sub(r"[\w)] & [\w(]", "", text), path  # no entities
        prose = re.sub(r"```.*?```|`[^`]*`|<!--.*?-->", "", text, flags=re.DOTALL)
        assert not re.search(r"(?<!\\)<[\w/!?]", prose), path  # nothing that Markdown would take for a tag


def test_disputes_are_about_schemes_that_are_there():
    for d in disputes.DISPUTES:
        assert set(d.schemes) <= set(scheme_names()), d.title
        assert d.text.endswith("."), d.title
        assert d.title in MADE["where_the_literature_disagrees.md"]
    assert len({d.title for d in disputes.DISPUTES}) == len(disputes.DISPUTES) >= 40


def test_links_lead_somewhere():
    for path, text in MADE.items():
        for target in re.findall(r"\]\(([^)#]+\.md)\)", text):
            assert (DOCS / path).parent.joinpath(target).exists(), (path, target)
