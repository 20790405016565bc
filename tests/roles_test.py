"""Roles are read from the names that modules gave, never from shapes."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen
from hypothesis import given
from hypothesis import strategies as st

from deepinit import roles
from deepinit.geometry import EMBEDDINGS, VECTORS, Role
from tests.models import born

matrices = st.sampled_from([r for r in Role if r not in (*VECTORS, *EMBEDDINGS)])
vectors = st.sampled_from(VECTORS)
qualifiers = st.from_regex(r"[a-z]{1,5}(_[a-z]{1,5})?", fullmatch=True)


@given(st.sampled_from(Role), st.lists(qualifiers, max_size=3))
def test_a_leaf_is_named_by_its_role(role, above):
    path = "/".join([*above, role])
    assert roles.role_of(path) is role
    assert roles.role_of([jax.tree_util.DictKey(p) for p in path.split("/")]) is role


@given(vectors, qualifiers)
def test_a_vector_may_have_a_qualifier(role, qualifier):
    assert roles.role_of(f"layers/mlp/{qualifier}_{role}") is role


@given(matrices, qualifiers)
def test_a_matrix_may_not(role, qualifier):
    assert roles.role_of(f"layers/mlp/{qualifier}_{role}") is None


@pytest.mark.parametrize("name", ["kernel", "scale", "w", "norm_scales", "attn_q2", "biased", ""])
def test_other_names_have_no_role(name):
    assert roles.role_of(f"layers/attention/{name}") is None


@pytest.mark.parametrize(
    ("path", "canonical", "slot", "layer", "stacked"),
    [
        ("token_embed", "token_embed", "token_embed", None, False),
        ("layers/attention/attn_q", "layers/attention/attn_q", "attn_q", None, True),
        ("layers_12/attention/attn_q", "layers/attention/attn_q", "attn_q", 12, False),
        ("encoder/layers_0/mlp/mlp_up", "encoder/layers/mlp/mlp_up", "encoder/mlp_up", 0, False),
        ("layers_3/mlp/up_bias", "layers/mlp/up_bias", "layers/mlp/up_bias", 3, False),
        ("final_norm/norm_scale", "final_norm/norm_scale", "final_norm/norm_scale", None, False),
        ("layers_1_2/mlp/router", "layers/mlp/router", "router", None, True),
        ("encoder/layers_4_1/mlp/up_bias", "encoder/layers/mlp/up_bias", "encoder/layers/mlp/up_bias", None, True),
        ("layers_1_0/kernel", "layers_1_0/kernel", "layers_1_0/kernel", None, False),
        ("layers_x/kernel", "layers_x/kernel", "layers_x/kernel", None, False),
    ],
)
def test_locate(path, canonical, slot, layer, stacked):
    leaf = roles.locate(path)
    assert (leaf.path, leaf.canonical, leaf.slot, leaf.layer, leaf.stacked) == (path, canonical, slot, layer, stacked)
    assert leaf.role is roles.role_of(path)


@pytest.mark.parametrize(
    ("path", "shape", "rows"),
    [
        ("layers/mlp/mlp_up", (3, 8, 8), (0, 1, 2)),
        ("layers_1_2/mlp/mlp_up", (3, 8, 8), (1, 3, 5)),
        ("layers_6_1/mlp/mlp_up", (1, 8, 8), (6,)),
        ("layers_12/mlp/mlp_up", (8, 8), (12,)),
        ("token_embed", (8, 8), (None,)),
    ],
)
def test_the_layers_of_a_leaf(path, shape, rows):
    leaf = roles.locate(path)
    assert leaf.rows(shape) == rows
    assert [leaf.at(i) for i in range(len(rows))] == list(rows)


# Every leaf of our own models has a role, and scanned and unrolled trees the same canonical paths and slots.
def test_scanned_and_unrolled_agree():
    options = {"bias": True, "qk_norm": True, "positions": "learned", "norm": "layernorm"}
    scanned = roles.leaves(born("layerscale", **options)[2])
    unrolled = roles.leaves(born("layerscale", scan=False, **options)[2])
    assert all(leaf.role for leaf, _ in scanned + unrolled)
    assert {(f.canonical, f.slot, f.role) for f, _ in scanned} == {(f.canonical, f.slot, f.role) for f, _ in unrolled}
    assert {f.layer for f, _ in unrolled} == {None, 0, 1, 2}
    assert all(f.stacked == f.path.startswith("layers/") for f, _ in scanned)
    assert not any(f.stacked for f, _ in unrolled)


def test_boxes_come_off():
    boxed = {
        "a": linen.Partitioned(jnp.ones(3), ("embed",)),
        "b": linen.LogicallyPartitioned(jnp.zeros((2, 3)), ("vocab", "embed")),
        "c": jnp.ones(2),
    }
    plain = roles.unboxed(boxed)
    assert jax.tree.structure(plain) == jax.tree.structure({"a": 0, "b": 0, "c": 0})
    assert [leaf.path for leaf, _ in roles.leaves(boxed)] == ["a", "b", "c"]
    # abstract values, as eval_shape gives them
    assert jax.tree.map(lambda x: x.shape, roles.unboxed(jax.eval_shape(lambda: boxed))) == {
        "a": (3,),
        "b": (2, 3),
        "c": (2,),
    }
