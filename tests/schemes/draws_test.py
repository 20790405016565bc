"""Values drawn under every scheme obey their law, in float32 and cast to bfloat16."""

import math

import ml_dtypes
import numpy as np
import pytest

from deepinit.geometry import VECTORS, Geometry
from deepinit.laws import Constant, External, Factor, Orthogonal
from deepinit.replays import redrawn
from deepinit.schemes.registry import recipe, scheme_names

G = Geometry(num_layers=5, d_model=64, num_heads=8, num_kv_heads=4, d_ff=160, vocab_size=100, num_experts=2)
N = 20_000
Z = 5.5  # two-sided 4e-8; some 3000 numbers are looked at


@pytest.mark.parametrize("name", scheme_names())
def test_drawn_values(name):
    r = recipe(name, G)
    seen = set()
    for role, whole in r.weights.items():
        if isinstance(whole, External | Factor | Orthogonal):
            continue
        for layer in {0, 2, G.num_layers - 1} if whole.layered else {None}:
            law = whole if layer is None else whole.at(layer)
            if (law, role in VECTORS) in seen:
                continue
            seen.add((law, role in VECTORS))
            values = redrawn(law, role, np.arange(N), layer=layer)  # more entries than a matrix has
            assert values.dtype == np.float32
            for x, rounding in ((values, 2.0**-24), (values.astype(ml_dtypes.bfloat16), 2.0**-8)):
                x = x.astype(np.float64)
                if isinstance(law, Constant):
                    assert np.all(np.abs(x - law.value) <= rounding * abs(law.value))
                    continue
                assert np.abs(x).max() <= law.bound * (1 + rounding) + 1e-7
                assert abs(x.mean()) < Z * law.std / math.sqrt(N)
                spread = math.sqrt(max(law.kurtosis - 1, 1e-6) / 4 / N)
                assert abs(x.std() / law.std - 1) < Z * spread + 4 * rounding
