"""The shipped configs: they load, and their initial states are the published ones."""

import json
import re
from pathlib import Path

import pytest

from deepinit.train.birth import born
from deepinit.train.config import Config, load

ROOT = Path(__file__).parents[1]
DIGESTS = json.loads((ROOT / "tests" / "golden" / "digests.json").read_text())
LARGE = {"llama_1b"}  # 5 GB of parameters


def test_every_config_has_a_published_digest():
    assert {p.stem for p in (ROOT / "configs").glob("*.yaml")} == set(DIGESTS)
    published = re.findall(r"^\| (\w+) \| `([0-9a-f]{32})` \|$", (ROOT / "docs" / "digests.md").read_text(), re.M)
    assert dict(published) == DIGESTS


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LARGE else ()) for n in DIGESTS])
def test_initial_state_is_the_published_one(name):
    config = load([str(ROOT / "configs" / f"{name}.yaml")])
    config.check()
    verdict = born(config).verdict
    assert verdict.ok, verdict.table()
    assert verdict.digest == DIGESTS[name]


@pytest.mark.parametrize("name", DIGESTS)
def test_config_round_trips(name):
    config = load([str(ROOT / "configs" / f"{name}.yaml")])
    assert Config.from_dict(config.to_dict()) == config
