"""What a compiled step moves between devices: weights layer by layer, sums into shards; no activations, no stacks."""

import math
from collections import Counter

import jax
import numpy as np
import pytest

from deepinit import sharding
from deepinit.collectives import listed, moved
from deepinit.nn import Decoder
from deepinit.sharded_init import init_sharded
from deepinit.train import step
from deepinit.train.birth import planned
from deepinit.train.config import load
from deepinit.train.program import Program

LAYERS, D, HEADS, HEAD, F, V, B, T = 4, 64, 8, 8, 192, 512, 16, 32
SIZES = f"""--model.num-layers {LAYERS} --model.d-model {D} --model.num-heads {HEADS} --model.d-ff {F}
    --model.vocab-size {V} --data.seq-len {T} --train.batch-size {B}"""


def compiled(flags):
    """The text of a training step compiled for a mesh; nothing is allocated."""
    config = load([], f"{SIZES} {flags}".split())
    config.check()
    return Program(config, planned(config)).ready()[0].as_text()


def size(shape):
    return math.prod(shape)


MATRICES = [(D, HEADS, HEAD)] * 3 + [(HEADS, HEAD, D)] + [(D, F)] * 2 + [(F, D)]


@pytest.mark.parametrize("mesh", ["--mesh.fsdp 8", "--mesh.data 2 --mesh.fsdp 4", "--mesh.fsdp 8 --model.remat full"])
def test_fsdp_gathers_each_matrix_twice_and_sums_its_gradient_once(mesh):
    found = moved(compiled(mesh))
    assert {kind for kind, _ in found} <= {"all-gather", "all-reduce", "reduce-scatter"}
    gathered, summed = Counter(), Counter()  # by size: products see matrices flat, some gradients transposed
    for (kind, shape), n in found.items():
        (gathered if kind == "all-gather" else summed)[size(shape)] += n
    matrices = Counter(map(size, MATRICES))
    assert gathered == Counter({**{s: 2 * n for s, n in matrices.items()}, V * D: 2})
    assert {s: summed[s] for s in matrices} == matrices
    # nothing as large as a part of a batch's activations, and no stack at once
    assert not [s for _, s in found if size(s) >= B * T * F // 8 and size(s) not in {*matrices, V * D}]
    assert not [s for _, s in found if s[:1] == (LAYERS,) and size(s) > LAYERS]


def test_tensor_sums_the_stream_and_never_moves_logits_or_weights():
    found = moved(compiled("--mesh.tensor 8"))
    assert {kind for kind, _ in found} == {"all-reduce"}
    large = Counter()
    for (_, shape), n in found.items():
        large[size(shape)] += n if size(shape) > B * T else 0
    assert set(+large) == {B * T * D}
    # two a layer forward, two or more backward (not all are merged), and those of embedding and head
    assert large[B * T * D] <= 10


def test_all_axes_at_once_keep_logits_apart():
    found = moved(compiled("--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2"))
    assert {kind for kind, _ in found} <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert not [s for _, s in found if len(s) == 3 and s[-1] in (V, V // 2)]
    assert max(size(s) for _, s in found) <= V * D


def test_a_split_sequence_gathers_keys_and_values_alone():
    found = moved(compiled("--mesh.sequence 4 --mesh.tensor 2"))
    gathered = [s for kind, s in found if kind == "all-gather"]
    assert gathered
    assert all(size(s) <= B * T * D for s in gathered)
    assert not [s for _, s in found if s[-1:] in ((V,), (V // 2,)) and len(s) == 3]
    assert not [s for _, s in found if s.count(T) > 1]  # no scores


def test_accumulated_gradients_stay_in_their_shards():
    text = compiled("--mesh.fsdp 8 --train.accumulate 2")
    loops = [line for line in text.splitlines() if " while(" in line]
    whole = f"f32[{LAYERS},{D},{F}]"
    assert loops
    assert not [line for line in loops if whole in line]


# beside a loop with collectives, XLA's CPU runtime may start another, in another order on every process
@pytest.mark.parametrize("more", ["", "--model.remat full --model.loss-chunks 2 --train.accumulate 2"])
def test_processes_of_cpus_have_no_collective_in_a_loop(monkeypatch, more):
    def outside(text):
        return moved(text.partition("\nENTRY ")[2])

    flags = f"--mesh.data 2 --mesh.fsdp 4 {more}"
    text = compiled(flags)
    assert outside(text) != moved(text)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    text = compiled(flags)
    assert outside(text) == moved(text) != Counter()


@pytest.mark.parametrize("mesh", ["--mesh.sequence 4 --mesh.tensor 2", "--mesh.data 2 --mesh.sequence 4"])
def test_a_split_sequence_changes_no_loss(mesh):
    config = load([], f"{SIZES} {mesh}".split())
    recipe = config.check()
    tokens = np.random.default_rng(0).integers(0, V, (B, T + 1)).astype(np.int32)
    batch = {"tokens": tokens, "weights": np.ones((B, T), np.float32)}
    losses = []
    for sizes in ({}, {axis: getattr(config.mesh, axis) for axis in sharding.MESH_AXES}):
        on = sharding.make_mesh(sizes)
        model = Decoder.from_recipe(recipe, **config.model_options())
        params = init_sharded(model, recipe, on, 0)
        with jax.set_mesh(on):
            loss, _, grads = jax.jit(lambda p, b, m=model: step.gradients(m, p, b))(params, step.put(batch, 1, on))
            losses.append((float(loss), jax.device_get(grads)))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), losses[0][1], losses[1][1])


def test_collectives_are_read_from_a_program_s_text():
    text = """
      %r = f32[8,64]{1,0} all-reduce(%a), to_apply=%sum
      %s = (f32[8,64]{1,0}, f32[]) all-reduce(%b, %c), to_apply=%sum
      %g = bf16[16,64]{1,0} all-gather-start(%d), dimensions={0}
      %n = f32[128,128]{1,0} dot(%e, %f)
    """
    found = moved(text)
    assert found == {("all-reduce", (8, 64)): 2, ("all-reduce", ()): 1, ("all-gather", (16, 64)): 1}
    assert listed(found) == [("all-gather", "16 x 64", 1), ("all-reduce", "8 x 64", 2)]
