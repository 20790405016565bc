"""The portable draws: the same bits in NumPy and in every way of running jax; the law of the integer table, exactly."""

import functools
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32
from jax.sharding import NamedSharding, PartitionSpec
from scipy import stats

import deepinit
from deepinit import laws, sampler
from tests.models import born, mesh_of

words = st.integers(0, 2**32 - 1)
KINDS = [("normal", 0.0), ("normal", 2.0), ("normal", 3.0), ("normal", 1.25), ("uniform", 0.0), ("unit", 0.0)]
SHAPES = [(), (1,), (9,), (5, 7), (1, 3, 4), (2, 3, 1, 5)]
KEY = jax.random.key(7, impl="threefry2x32")


@functools.partial(jax.jit, static_argnums=(1, 3, 4))
def drawn(key, shape, number, kind, cut):
    """`sampler.draw` compiled."""
    return sampler.draw(key, shape, number, kind, cut)


def replayed(key, shape, number, kind, cut=0.0):
    """The same array from NumPy alone."""
    index = np.arange(math.prod(shape), dtype=np.uint64)
    split = (index >> np.uint64(32)).astype(np.uint32), index.astype(np.uint32)
    words = tuple(np.asarray(jax.random.key_data(key)))
    return sampler.values(words, split, np.float32(number), kind, cut).reshape(shape)


# --- bits --------------------------------------------------------------------------------------------------------


# Known answers of Random123 (Salmon et al. 2011): rounds, counter and key, result.
@pytest.mark.parametrize(
    ("rounds", "counter", "key", "answer"),
    [
        (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        (13, (0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0xFD36D048, 0x2D17272C)),
        (13, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xBA3E4725, 0xF27D669E)),
        (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        (20, (0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        (20, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(rounds, counter, key, answer):
    with np.errstate(over="ignore"):
        got = sampler.threefry(tuple(map(np.uint32, key)), *map(np.uint32, counter), rounds)
    assert tuple(map(int, got)) == answer


@given(words, words, st.lists(words, min_size=2, max_size=8).filter(lambda c: len(c) % 2 == 0))
def test_block_is_that_of_jax(k0, k1, counters):
    key, count = np.asarray([k0, k1], np.uint32), np.asarray(counters, np.uint32)
    with np.errstate(over="ignore"):
        ours = np.concatenate(sampler.threefry(tuple(key), *np.split(count, 2)))
    assert (ours == np.asarray(threefry_2x32(jnp.asarray(key), jnp.asarray(count)))).all()


@given(words, words)
def test_seed_and_fold_are_those_of_jax(seed, data):
    key = jax.random.key(seed, impl="threefry2x32")
    assert sampler.seed_words(seed) == tuple(np.asarray(jax.random.key_data(key)))
    folded = jax.random.key_data(jax.random.fold_in(key, jnp.uint32(data)))
    assert sampler.fold(sampler.seed_words(seed), np.uint32(data)) == tuple(np.asarray(folded))


@given(st.integers(0, 2**63 - 1))
def test_a_seed_keeps_all_64_bits(seed):
    high, low = sampler.seed_words(seed)
    assert (int(high) << 32) + int(low) == seed


def test_slots_have_keys_of_their_own():
    slots = [f"layers/{a}/{b}" for a in ("attention", "mlp") for b in ("attn_q", "mlp_up", "norm_scale")] + ["attn_q"]
    assert len({tuple(map(int, sampler.slot_words(seed, s))) for s in slots for seed in (0, 1, 2**32)}) == 3 * len(
        slots
    )


# --- keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_every_implementation(impl):
    typed = [jax.random.key(seed, impl=impl) for seed in (0, 1)]
    legacy = [jax.random.key_data(k) for k in typed]
    a, b = (np.asarray(sampler.draw(k, (100,), 1.0, "normal")) for k in typed)
    assert not np.intersect1d(a, b).size > 2
    assert (np.asarray(sampler.draw(legacy[0], (100,), 1.0, "normal")) == a).all()
    assert (np.asarray(drawn(typed[1], (100,), 1.0, "normal", 0.0)) == b).all()
    if impl == "threefry2x32":
        assert (np.asarray(sampler.draw(jax.random.PRNGKey(0), (100,), 1.0, "normal")) == a).all()


# case B45: rbg keys do not commute with vmap in jax's own draws; here they do
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_batch_of_keys_is_a_loop_over_keys(impl):
    keys = jax.random.wrap_key_data(
        jnp.stack([jax.random.key_data(jax.random.key(s, impl=impl)) for s in range(4)]), impl=impl
    )
    at_once = np.asarray(jax.vmap(lambda k: sampler.draw(k, (3, 5), 1.0, "normal", 2.0))(keys))
    assert (at_once == np.stack([np.asarray(sampler.draw(k, (3, 5), 1.0, "normal", 2.0)) for k in keys])).all()


def test_one_key_at_a_time():
    with pytest.raises(ValueError, match=r"one key is needed, got keys of shape \(3,\)"):
        sampler.draw(jax.random.split(KEY, 3), (2,), 1.0, "normal")


# --- counters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_counters_are_flat_indices(shape):
    high, low = sampler.counters(shape)
    assert (np.asarray(low) == np.arange(math.prod(shape)).reshape(shape)).all()
    assert not np.asarray(high).any()


@given(words, st.integers(0, 2**48 - 1))
@example(2**32 - 1, 2**48 - 1)
@example(2**16, 2**16)
def test_wide_multiply(i, factor):
    with np.errstate(over="ignore"):
        high, low = sampler.wide_multiply(np.uint32(i), factor)
    assert (int(high) << 32) + int(low) == i * factor % 2**64


LARGE = [(2**20, 2**15), (3, 2**31 + 11, 2), (2**17, 3, 2**16), (1, 5, 2**32 - 1)]


# The index is 64 bits wide: two entries 2^32 apart differ. Only the entries asked for are ever made.
@pytest.mark.parametrize("shape", LARGE)
def test_beyond_four_billion_entries(shape):
    rng = np.random.default_rng(0)
    corners = [tuple(0 for _ in shape), tuple(n - 1 for n in shape)]
    picked = corners + [tuple(int(rng.integers(n)) for n in shape) for _ in range(3)]
    limits = [tuple(i + 1 for i in at) for at in picked]

    @jax.jit
    def entries():
        whole = sampler.counters(shape)
        return [[jax.lax.slice(w, at, to).ravel()[0] for w in whole] for at, to in zip(picked, limits)]

    compiled = entries.lower().compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
    for at, (high, low) in zip(picked, compiled()):
        flat = sum(i * math.prod(shape[a + 1 :]) for a, i in enumerate(at))
        assert (int(high) << 32) + int(low) == flat


def test_the_high_word_counts():
    index = np.asarray([5, 5 + 2**32, 5 + 2**40], np.uint64)
    split = (index >> np.uint64(32)).astype(np.uint32), index.astype(np.uint32)
    assert len(set(sampler.values(sampler.seed_words(0), split, np.float32(1), "normal"))) == 3


# --- one array, however it is made -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "cut"), KINDS)
def test_numpy_twin(kind, cut):
    shape = (37, 41)
    expected = replayed(KEY, shape, 0.02, kind, cut)
    number = jnp.float32(0.02)
    assert expected.dtype == np.float32
    for got in (
        sampler.draw(KEY, shape, 0.02, kind, cut),
        drawn(KEY, shape, number, kind, cut),
        jax.jit(lambda k: 1.0 * sampler.draw(k, shape, 0.02, kind, cut))(KEY),
    ):
        assert got.dtype == jnp.float32
        assert (np.asarray(got) == expected).all()


@given(words, st.sampled_from(SHAPES), st.floats(2**-10, 8, width=32), st.sampled_from(KINDS[1:5:3]))
def test_numpy_twin_at_any_key_shape_and_number(seed, shape, number, law):
    key = jax.random.key(seed, impl="threefry2x32")
    got = np.asarray(drawn(key, shape, jnp.float32(number), *law))
    assert got.shape == shape
    assert (got == replayed(key, shape, number, *law)).all()


# case B44: every layout of a (48, 64) kernel over 8 devices
@pytest.mark.parametrize("sizes", [(1, 1, 8), (1, 2, 4), (1, 4, 2), (1, 8, 1)])
def test_sharded(sizes):
    expected = replayed(KEY, (48, 64), 0.02, "normal", 2.0)
    for spec in (("fsdp", "tensor"), ("tensor", "fsdp"), (None, "tensor"), ("fsdp",), (("fsdp", "tensor"),)):
        layout = NamedSharding(mesh_of(sizes), PartitionSpec(*spec))
        make = jax.jit(lambda k: sampler.draw(k, (48, 64), 0.02, "normal", 2.0), out_shardings=layout)
        assert (np.asarray(make(KEY)) == expected).all()


# case B03: the number may be traced, and comes from a table by layer
def test_layers():
    table = jnp.asarray([0.5, 0.25, 0.125, 0.3], jnp.float32)
    keys = jax.random.split(KEY, 4)

    def one(key, layer):
        return sampler.draw(key, (8, 9), table[layer], "normal", 3.0)

    by_scan = jax.lax.scan(lambda c, kl: (c, one(*kl)), 0, (keys, jnp.arange(4)))[1]
    by_vmap = jax.jit(jax.vmap(one))(keys, jnp.arange(4))
    by_loop = np.stack([replayed(keys[i], (8, 9), table[i], "normal", 3.0) for i in range(4)])
    assert (np.asarray(by_scan) == by_loop).all()
    assert (np.asarray(by_vmap) == by_loop).all()


def x64_probe():
    """What must not depend on jax_enable_x64: draws of every kind, and a whole model."""
    draws = [drawn(KEY, (37, 41), jnp.float32(0.02), *kind) for kind in KINDS]
    assert all(x.dtype == np.float32 for x in draws)
    return f"{deepinit.digest(draws)} {deepinit.digest(born('modern')[2])}"


# case B42: x64 consumes other bits in jax's own draws; here nothing follows the default float
def test_x64_changes_nothing():
    script = (
        "import jax; from tests.sampler_test import x64_probe, sampler\n"
        "wide = jax.random.key(2**40 + 5, impl='threefry2x32')\n"
        "assert [*sampler.seed_words(2**40 + 5)] == [*jax.random.key_data(wide)], 'a seed of more than 32 bits'\n"
        "print(x64_probe())"
    )
    command = [sys.executable, "-W", "error", "-c", script]
    other = subprocess.run(
        command,
        env={**os.environ, "JAX_ENABLE_X64": "1"},
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert other.stdout.strip() == x64_probe(), other.stderr


# --- the law -----------------------------------------------------------------------------------------------------


@functools.cache
def whole_table(cut):
    """(values in sigmas, weights) over all 2^31 magnitudes, one entry for each value that the table can give."""
    values, weights = [], []
    for octave in range(32):  # of 2 word + 1
        bits = max(30 - octave, 0)  # of the word, below its leading one
        kept = min(bits, sampler.SUB + sampler.FRAC)
        m = (octave < 31) * (1 << bits) + (np.arange(1 << kept, dtype=np.uint64) << np.uint64(bits - kept))
        word = m.astype(np.uint32) | np.uint32(1 << 31)
        values.append(sampler.normal_integers(word, cut))
        weights.append(np.full(len(m), 2.0 ** (bits - kept)))
    z = np.concatenate(values).astype(np.float64) * 2.0**-sampler.SCALE
    return z, np.concatenate(weights) / 2.0**31


@pytest.mark.parametrize("cut", [0.0, 1.0, 2.0, 3.0, 5.0])
def test_moments_of_the_whole_table(cut):
    z, weight = whole_table(cut)
    assert weight.sum() == pytest.approx(1, abs=1e-15)
    std, kurtosis = laws.truncated_moments(cut)
    second, fourth = (float((weight * z**p).sum()) for p in (2, 4))
    assert math.sqrt(second) / std == pytest.approx(1, abs=1e-6)
    assert fourth / second**2 / kurtosis == pytest.approx(1, abs=2e-6)


@pytest.mark.parametrize("cut", [0.0, 2.0, 3.0])
def test_tails_of_the_whole_table(cut):
    z, weight = whole_table(cut)
    tail = stats.norm.sf(cut) if cut else 0.0
    for at in (0.0, 0.5, 1.0, 1.9, 2.5, 4.0, 5.5):
        if at < (cut or math.inf):
            expected = 2 * (stats.norm.sf(at) - tail) / (1 - 2 * tail)
            assert weight[z > at].sum() == pytest.approx(expected, rel=2e-4, abs=2e-9)


def test_symmetry():
    m = np.random.default_rng(0).integers(1, 2**31, 10_000).astype(np.uint32)
    for cut in (0.0, 2.0):
        assert (sampler.normal_integers(m, cut) == -sampler.normal_integers(m | np.uint32(2**31), cut)).all()
    odd = sampler.uniform_integers(m)
    assert (sampler.uniform_integers(~m) == -odd).all()
    assert (odd % 2 != 0).all()
    assert np.abs(odd).max() < 2**24


# case B37: the cut is in sigmas, and no value stands at a bound because it was clamped
@pytest.mark.parametrize("cut", [2.0, 3.0])
def test_no_value_at_the_bound(cut):
    z, weight = whole_table(cut)
    last = cut - 2.0**-sampler.SCALE  # of the grid
    assert z.max() == last
    assert z.min() >= 0
    # a grid step of the density at the bound, and no more: nothing is heaped up
    density = 2 * stats.norm.pdf(cut) / (1 - 2 * stats.norm.sf(cut))
    assert weight[z == last].sum() == pytest.approx(2.0**-sampler.SCALE * density, rel=0.1)


# case B37: ten million draws of std 0.02 cut at 3
def test_ten_million_draws():
    w = np.asarray(drawn(KEY, (10_000_000,), jnp.float32(0.02), "normal", 3.0))
    assert np.abs(w).max() <= 0.06
    assert np.abs(w).max() > 0.0599
    # Poisson with mean 10^7 times the largest value's weight, 0.34: 9 are as rare as 1e-10
    assert (np.abs(w) == np.abs(w).max()).sum() <= 8


@pytest.mark.parametrize(("kind", "cut"), KINDS)
def test_draws_follow_the_law(kind, cut):
    n = 200_000
    x = np.asarray(drawn(KEY, (n,), 1.0, kind, cut), np.float64)
    law = {
        "normal": stats.truncnorm(-cut, cut) if cut else stats.norm(),
        "uniform": stats.uniform(-1, 2),
        "unit": stats.uniform(),
    }[kind]
    assert stats.kstest(x, law.cdf).pvalue > 1e-6
    # neighbours along the index are not correlated: sqrt(n) r is standard normal
    z = (x - law.mean()) / law.std()
    for lag in (1, 2, 32, 1024):
        assert abs((z[lag:] * z[:-lag]).mean()) * math.sqrt(n) < 5.5


def test_neighbouring_keys_are_independent():
    n = 100_000
    a, b, c = (np.asarray(drawn(jax.random.key(s), (n,), 1.0, "normal", 0.0), np.float64) for s in (0, 1, 2))
    for x, y in ((a, b), (b, c), (a, c)):
        assert abs((x * y).mean()) * math.sqrt(n) < 5.5
