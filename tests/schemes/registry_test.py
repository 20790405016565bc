"""Names, aliases, hyperparameters, norm placements: what is refused, and what the one line says."""

import subprocess
import sys
import textwrap

import pytest

from deepinit.errors import ConfigError
from deepinit.geometry import Geometry
from deepinit.schemes.registry import entry, recipe, register, resolve, scheme_names, schemes

G = Geometry(num_layers=4, d_model=64, num_heads=4, d_ff=256, vocab_size=1000)


def refused(*args, **kwargs):
    with pytest.raises(ConfigError) as e:
        recipe(*args, **kwargs)
    message = str(e.value)
    assert len(message.splitlines()) == 1
    return message


def test_names_are_unique_and_grouped_by_family():
    names = scheme_names()
    families = [s.family for s in schemes()]
    assert len(names) == len(set(names))
    assert [f for i, f in enumerate(families) if i == 0 or families[i - 1] != f] == list(dict.fromkeys(families))
    assert not set(names) & {a for s in schemes() for a in s.aliases}


def test_an_alias_gives_the_scheme_itself():
    assert recipe("deepnet", G) == recipe("deepnorm", G)
    assert recipe("deepnet", G).name == "deepnorm"
    assert entry("kaiming") is entry("he_normal")


def test_an_alias_may_preset_hyperparameters():
    r = recipe("xavier", G)
    assert (r.name, dict(r.args)) == ("glorot_normal", {"embedding": "lookup"})
    assert recipe(r.name, G, **r.args) == r
    assert recipe("xavier", G, embedding="matrix").weights == recipe("glorot_normal", G).weights
    assert resolve("xavier")[1] == {"embedding": "lookup"}


def test_unknown_scheme_names_the_nearest():
    assert refused("depnorm", G) == "scheme 'depnorm' is unknown; did you mean 'deepnorm'?"
    assert "did you mean 'gpt2'" in refused("gtp2", G)


# case B77: an option that the chosen scheme does not have is an error too
def test_unknown_hyperparameter():
    assert "did you mean 'std'" in refused("gpt2", G, sdt=0.01)
    message = refused("gpt2", G, share="layer")
    assert "option 'share' is unknown" in message
    assert "an option of rezero" in message


@pytest.mark.parametrize(
    ("hyper", "says"),
    [
        ({"std": "0.02"}, "std '0.02' is unknown; known: sqrt(2/d)"),
        ({"std": -0.02}, "token_embed has std -0.02, not a positive number"),
        ({"std": float("nan")}, "nan is not"),
        ({"std": True}, "True is not a number"),
        ({"cut": None}, "cut: None is not a number"),
        ({"cut": -1}, "cut: -1.0 is negative"),
        ({"divisor": "totl"}, "did you mean 'total'"),
        ({"corrected": 1}, "corrected: 1 is not true or false"),
    ],
)
def test_wrong_value(hyper, says):
    assert says in refused("gpt2", G, **hyper)


def test_a_whole_number_is_a_number():
    assert recipe("fixed_normal", G, std=1).args["std"] == 1.0


# case B20
def test_a_norm_that_the_scheme_cannot_have_is_refused_with_the_reason():
    message = refused("deepnorm", G, norm="pre")
    assert message.startswith("scheme deepnorm needs norm 'post' (x <- N(1.682 x + F(x)), arXiv:2203.00555")
    assert message.endswith("got 'pre'")
    for name in ("rezero", "fixup"):
        for norm in ("pre", "post", "sandwich"):
            assert f"{name} needs norm 'none'" in refused(name, G, norm=norm)
    assert "norm 'psot' is unknown; did you mean 'post'?" in refused("gpt2", G, norm="psot")


def test_an_accepted_norm_replaces_the_default():
    assert recipe("gpt2", G).residual.norm == "pre"
    assert recipe("gpt2", G, norm="post").residual.norm == "post"
    assert recipe("deepnorm", G, norm="post") == recipe("deepnorm", G)


def test_what_a_scheme_requires_of_the_model_is_data():
    assert recipe("fixup", G).requires["bias"] is False
    assert "needs model.tied_embeddings False; got True" in refused("fixup", G.replace(tied_embeddings=True))


def test_two_exact_zeros_in_one_branch_are_refused():
    from deepinit.laws import Constant
    from deepinit.recipe import FrozenMap, Gate, Recipe, Residual

    dead = Recipe({**recipe("gpt2", G).weights, "mlp_down": Constant(0.0)}, Residual(norm="none", gate=Gate(0.0)))
    with pytest.raises(ConfigError, match="both exactly zero in one branch"):
        dead.completed(name="dead", geometry=G, source="", args=FrozenMap(), version=1)


def test_a_scheme_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_schemes.py").write_text(
        textwrap.dedent('''
        import deepinit.schemes as schemes
        from deepinit.recipe import Recipe
        from deepinit.schemes.common import fixed

        @schemes.register("mine", source="our notes", aliases=("ours",))
        def mine(g, *, std: float = 0.5):
            """All 0.5."""
            return Recipe(fixed(g, std))
        ''')
    )
    monkeypatch.syspath_prepend(tmp_path)
    from deepinit.schemes import registry

    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))
    monkeypatch.setattr(registry, "_ALIASES", dict(registry._ALIASES))
    r = recipe("my_schemes:mine", G, std=0.25)
    assert r.weights["attn_q"].std == 0.25
    assert recipe("my_schemes:ours", G) == recipe("mine", G)
    assert "did you mean 'mine'" in refused("my_schemes:minne", G)
    assert "cannot import 'my_scheme'" in refused("my_scheme:mine", G)
    with pytest.raises(ConfigError, match="registered already"):
        register("gpt2", source="x")(lambda g: r)


def test_no_jax():
    code = "import sys, deepinit.schemes as s; s.scheme_names(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_public_function_is_not_hidden_by_the_module():
    code = (
        "import deepinit as d; d.Recipe; from deepinit.recipe import Gate; d.recipe('gpt2', d.Geometry(1, 8, 1, 8, 8))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
