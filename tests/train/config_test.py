"""The strict loader, the checks that need no jax, and the round trip through YAML."""

import dataclasses
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinit.errors import ConfigError
from deepinit.geometry import Geometry
from deepinit.recipe import FrozenMap
from deepinit.schemes.registry import scheme_names, undecided
from deepinit.train import config as configs
from deepinit.train import loader
from deepinit.train.config import Config, load

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def one_line(call, *args):
    """The text of the ConfigError that the call ends with; it must be one line."""
    with pytest.raises(ConfigError) as e:
        call(*args)
    text = str(e.value)
    assert "\n" not in text
    return text


def written(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return str(path)


# ---------------------------------------------------------------------------------------------- round trip

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12)
FREE = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False), WORDS)


def values(kind):
    """Any value of a field's type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=4).map(tuple) if args[-1] is ... else st.tuples(*map(values, args))
    if loader.is_mapping(kind):
        names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
        plain = FREE.filter(lambda v: not isinstance(v, str) or loader.free(v, "") == v)
        plain = values(args[0]) if loader.is_mapping(args[0]) else plain
        return st.dictionaries(names, plain, max_size=3).map(FrozenMap)
    return {
        int: st.integers(-(2**63), 2**63),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: WORDS,
    }[kind]


def sections():
    made = {}
    for name, section in loader.types_of(Config).items():
        made[name] = st.builds(section, **{k: values(t) for k, t in loader.types_of(section).items()})
    return st.builds(Config, **made)


@settings(max_examples=100, deadline=None)
@given(sections())
def test_yaml_round_trip(config):
    text = config.to_yaml()
    again = Config.from_dict(loader.parse(text))
    assert again == config
    assert again.to_yaml() == text


def test_flag_round_trip():
    """Every field's default, written as a flag, gives the default again."""
    arguments = [
        part for flag, _, default, _ in configs.describe() if default != "{}" for part in (flag, default.strip("'"))
    ]
    assert load([], arguments) == Config()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs(path):
    config = load([path])
    recipe = config.check()
    assert recipe.geometry == config.geometry()
    assert Config.from_dict(config.to_dict()) == config


def test_later_files_and_flags_win(tmp_path):
    low, high = tmp_path / "low.yaml", tmp_path / "high.yaml"
    low.write_text("model: {num_layers: 3, d_model: 64}\ntrain: {steps: 7}\n")
    high.write_text("model: {num_layers: 5}\n")
    config = load([low, high], ["--train.steps", "9", "--optimizer.lr=1e-3"])
    assert (config.model.num_layers, config.model.d_model, config.train.steps) == (5, 64, 9)
    assert config.optimizer.lr == 1e-3


def test_flags_by_declared_type():
    flags = """--model.num-layers 1000 --model.d_model=96 --train.run-dir 2024 --model.scan false --mesh.fsdp -1
        --optimizer.betas 0.9,0.99 --data.files a.txt --train.steps 1e3 --model.norm-placement none
        --scheme.name fixed_normal --scheme.args.std 6e-3"""
    config = load([], flags.split())
    assert config.model.num_layers == 1000
    assert config.model.d_model == 96
    assert config.train.run_dir == "2024"
    assert config.model.scan is False
    assert config.mesh.fsdp == -1
    assert config.optimizer.betas == (0.9, 0.99)
    assert config.data.files == ("a.txt",)
    assert config.train.steps == 1000
    assert config.scheme.args == {"std": 0.006}
    assert config.model.norm_placement == "none"


# case B35: a std is a std, whatever the width
def test_std_keeps_its_meaning():
    for width in (128, 4096):
        flags = ["--scheme.name", "fixed_normal", "--scheme.args.std", "0.02", "--model.d-model", str(width)]
        assert load([], flags).recipe().weights["attn_q"].std == 0.02


def test_another_scheme_drops_the_arguments_of_the_first(tmp_path):
    path = written(tmp_path, "scheme: {name: fixed_normal, args: {std: 0.01}}\n")
    assert load([path], ["--scheme.args.std", "0.03"]).scheme.args == {"std": 0.03}
    assert load([path], ["--scheme.name", "rezero"]).scheme.args == {}
    assert load([path], ["--scheme.name", "fixed_normal"]).scheme.args == {"std": 0.01}


def test_a_switch_alone_is_on():
    config = load([], ["--model.qk-norm", "--model.bias", "--train.steps", "30"])
    assert (config.model.qk_norm, config.model.bias, config.train.steps) == (True, True, 30)
    assert load([], ["--model.scan", "false", "--model.qk-norm"]).model.scan is False


# case B61
def test_the_base_of_a_config_is_for_every_scheme_that_asks():
    flags = ["--scheme.base", "{width: 64, depth: 2}", "--scheme.name"]
    given = load([], [*flags, "completep"])
    assert given.scheme_args == {"base_width": 64, "base_depth": 2}
    assert (
        given.check()
        == load([], ["--scheme.name", "completep", "--scheme.args", "{base_width: 64, base_depth: 2}"]).check()
    )
    assert load([], [*flags, "mup"]).scheme_args == {"base_width": 64}
    assert load([], [*flags, "mup", "--scheme.args.base-width", "32"]).scheme_args == {"base_width": 32}
    assert load([], [*flags, "gpt2"]).scheme_args == {}
    assert "scheme.base" in one_line(lambda: load([], ["--scheme.base.widht", "64", "--scheme.name", "mup"]))
    tiny = load(["configs/tiny.yaml"], ["--scheme.name", "depth_mup"])
    assert tiny.check().updates["mlp_up"].lr == pytest.approx(1 / (2 * 2**0.5))


def test_named_values_one_by_one_and_together():
    one_by_one = ["--scheme.name", "completep", "--scheme.args.base-width", "64", "--scheme.args.base-depth", "2"]
    together = ["--scheme.name", "completep", "--scheme.args", "{base_width: 64, base_depth: 2}"]
    assert load([], one_by_one) == load([], together)


# ---------------------------------------------------------------------------------------------- refused on loading


# case B77
@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--model.num-layer", "3"], ["model.num_layer", "'num_layers'"]),
        (["--model.lr", "3"], ["model.lr", "optimizer.lr"]),
        (["--init=gtp2"], ["'init'", "scheme"]),
        (["--scheme", "rezero"], ["--scheme.name"]),
        (["--scheme.name"], ["--scheme.name: needs a value"]),
        (["--model.num-layers", "x"], ["model.num_layers", "whole number", "'x'"]),
        (["--model.num-layers", "2.5"], ["model.num_layers", "2.5"]),
        (["--model.num-layers", "true"], ["model.num_layers", "True"]),
        (["--model.bias", "3"], ["model.bias", "true or false", "3"]),
        (["--model.remat", "ful"], ["model.remat", "'ful'", "'full'"]),
        (["--optimizer.betas", "0.9"], ["optimizer.betas", "2 values"]),
        (["--optimizer.lr", ".nan"], ["optimizer.lr", "finite"]),
        (["--optimizer.lr", "[1"], ["--optimizer.lr", "YAML"]),
        (["--mesh.data.x", "3"], ["--mesh.data value"]),
        (["--scheme.args", "3"], ["--scheme.args.name value"]),
        (["--model.num-layers", "{x: 3}"], ["model.num_layers", "whole number"]),
        (["--optimizer.lr", "--train.steps", "3"], ["--optimizer.lr: needs a value"]),
        (["train.steps", "3"], ["'train.steps'", "flag"]),
    ],
)
def test_flags_refused(flags, parts):
    text = one_line(load, [], flags)
    assert all(part in text for part in parts), text


# case B77
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("init: {schem: deepnorm}\n", ["x.yaml", "'init'", "scheme"]),
        ("scheme: {nam: deepnorm}\n", ["x.yaml", "scheme.nam", "'name'"]),
        ("scheme: deepnorm\n", ["x.yaml", "scheme: expected a section", "scheme.name"]),
        ("model:\n  num_layers: 3\n  num_layers: 4\n", ["x.yaml", "line 3", "num_layers", "twice"]),
        ("model: {}\nmodel: {}\n", ["x.yaml", "line 2", "twice"]),
        ("model: {num_layers: '3'}\n", ["x.yaml", "model.num_layers", "'3'"]),
        ("model: {num_layers: null}\n", ["x.yaml", "model.num_layers", "None"]),
        ("- 1\n", ["x.yaml", "sections"]),
        ("model: [\n", ["x.yaml", "line 2", "not YAML"]),
        ("model: {num_layers: 3\ntrain: {}\n", ["x.yaml", "not YAML"]),
        ("scheme: {args: {std: {a: 1}}}\n", ["x.yaml", "scheme.args.std"]),
        ("data: {seed: 1979-02-30}\n", ["x.yaml"]),
    ],
)
def test_files_refused(tmp_path, text, parts):
    shown = one_line(load, [written(tmp_path, text)])
    assert all(part in shown for part in parts), shown


def test_missing_and_unreadable_files(tmp_path):
    written(tmp_path, "")
    assert "did you mean" in one_line(load, [str(tmp_path / "xx.yaml")])
    assert "cannot be read" in one_line(load, [str(tmp_path)])
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in one_line(load, [str(tmp_path / "b.yaml")])
    assert load([tmp_path / "x.yaml"]) == Config()


# ---------------------------------------------------------------------------------------------- refused by meaning


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--scheme.name gtp2", ["gtp2", "'gpt2'"]),
        ("--scheme.name rezero --scheme.args.residual_scale 0.1", ["rezero", "residual_scale"]),  # case B77
        ("--scheme.name deepnorm --model.norm-placement pre", ["deepnorm", "'post'"]),  # case B20
        ("--scheme.name fixup --model.bias true", ["fixup", "model.bias", "false"]),
        ("--scheme.name external", ["external"]),
        ("--train.batch-size 19 --mesh.data 4", ["train.batch_size: 19", "mesh.data 4", "16 or 20"]),  # case B78
        ("--model.num-heads 6 --model.head-dim 8 --mesh.tensor 4", ["model.num_heads: 6", "mesh.tensor 4"]),
        ("--model.num-heads 8 --model.vocab-size 50257 --mesh.tensor 8", ["50257", "mesh.tensor 8", "50264"]),
        ("--train.batch-size 16 --train.accumulate 3", ["train.accumulate 3", "15 or 18"]),
        ("--train.steps 30 --train.stop-at 31", ["train.stop_at: 31", "30"]),
        ("--model.loss-chunks 7", ["model.loss_chunks: 7", "data.seq_len", "nearest: 8"]),
        ("--train.steps 10", ["optimizer.warmup_steps: 20", "10"]),
        ("--optimizer.schedule wsd --train.steps 40 --optimizer.decay-steps 30", ["decay_steps: 30", "20"]),
        ("--data.seq-len 2048", ["data.seq_len: 2048", "max_seq_len 1024"]),
        ("--model.vocab-size 255", ["model.vocab_size: 255", "256"]),
        ("--model.param-dtype bfloat16", ["model.param_dtype", "bfloat16", "float32"]),  # case B40
        ("--model.num-heads 3", ["model.num_heads: 3", "128"]),
        ("--model.head-dim 7", ["model.head_dim: 7", "8"]),
        ("--model.stack encoder --model.encoder-layers 3 --model.decoder-layers 3", ["model.stack", "single"]),
        ("--mesh.data -1 --mesh.fsdp -1", ["mesh.fsdp: -1"]),
        ("--train.steps 0", ["train.steps: 0", "at least 1"]),
        ("--optimizer.betas 0.9,1.5", ["optimizer.betas: 1.5"]),
        ("--data.eval-fraction 0.9", ["data.eval_fraction: 0.9", "0.5"]),
        ("--train.profile [5,2]", ["train.profile"]),
        ("--train.profile 5", ["train.profile"]),
        ("--data.files nowhere.txt", ["data.files", "'nowhere.txt'"]),
        ("--train.run-dir pyproject.toml", ["train.run_dir", "'pyproject.toml'", "file"]),
    ],
)
def test_check_refuses(flags, parts):
    text = one_line(lambda: load([], flags.split()).check())
    assert all(part in text for part in parts), text


# case B40
def test_types_of_parameters_and_activations_are_apart():
    config = load([], ["--model.dtype", "bfloat16"])
    config.check()
    assert config.model_options()["dtype"] == "bfloat16"
    assert config.model_options()["param_dtype"] == "float32"


@pytest.mark.parametrize("name", [n for n in scheme_names() if n != "external"])
def test_every_scheme_passes_the_check(name):
    base = {"base_width": 128, "base_depth": 4}
    flags = [part for k in undecided(name, ()) for part in (f"--scheme.args.{k}", str(base[k]))]
    assert load([], ["--scheme.name", name, *flags]).check().name == name


# ---------------------------------------------------------------------------------------------- changed schemes


def test_numbers_of_a_role_are_changed_from_file_and_flags(tmp_path):
    text = "scheme: {name: gpt2, overrides: {attn_out: {std: 0.003}, lm_head: {value: 0}}}\n"
    config = load([written(tmp_path, text)], ["--scheme.overrides.attn_out.lr", "0.5"])
    recipe = config.check()
    assert recipe.weights["attn_out"].std == 0.003
    assert recipe.updates["attn_out"].lr == 0.5
    assert recipe.weights["lm_head"].bound == 0
    assert recipe.changes == ("attn_out: std 0.003, lr 0.5", "lm_head: value 0")
    assert Config.from_dict(loader.parse(config.to_yaml())) == config


def test_another_scheme_drops_what_was_changed_in_the_first(tmp_path):
    text = "scheme: {name: gpt2, residual: rezero, sampler: jax, overrides: {attn_out: {std: 0.003}}}\n"
    scheme = load([written(tmp_path, text)], ["--scheme.name", "opt"]).scheme
    assert (scheme.residual, scheme.overrides, scheme.sampler) == ("", {}, "jax")


def test_the_residual_rule_of_another_scheme():
    flags = "--scheme.name gpt2 --scheme.residual rezero --scheme.residual-args.share sublayer"
    recipe = load([], flags.split()).check()
    assert recipe.residual.gate.share == "sublayer"
    assert recipe.weights["attn_out"].std == pytest.approx(0.02 / 8**0.5)
    assert any("gated as well" in change for change in recipe.changes)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--scheme.overrides.attn_o.std 1", ["scheme", "attn_o", "'attn_out'"]),
        ("--scheme.overrides.attn_out 1", ["--scheme.overrides.name.name value"]),
        ("--scheme.overrides.attn_out.sdt 1", ["scheme.overrides.attn_out", "sdt", "'std'"]),
        ("--scheme.name gpt2 --scheme.residual deepnorm", ["deepnorm", "its own weights"]),
        ("--scheme.name zero_out --scheme.residual rezero", ["zero", "one branch"]),
        ("--scheme.residual-args.share layer", ["scheme.residual_args", "share", "scheme.residual"]),
        # case B61
        ("--scheme.name mup", ["scheme.args.base_width", "mup", "nearest: 128"]),
        ("--scheme.name completep --scheme.args.base_width 64", ["scheme.args.base_depth", "nearest: 4"]),
        ("--model.moe-every 2", ["model.moe_every: 2", "model.num_experts", "nearest: 1"]),
        ("--model.num-experts 4 --model.moe-every 9", ["model.moe_every: 9", "nearest: 4"]),
        ("--model.num-experts 4 --model.first-dense 4", ["model.first_dense: 4", "nearest: 3"]),
        ("--model.num-experts 4 --model.experts-per-token 5", ["experts_per_token: 5", "nearest: 4"]),
        ("--model.num-experts 4 --model.fused-gate-up true", ["model.fused_gate_up", "experts"]),
        ("--scheme.name megatron --scheme.calibration pyproject.toml", ["scheme.calibration", "pyproject.toml"]),
    ],
)
def test_changes_that_are_refused(flags, parts):
    text = one_line(lambda: load([], flags.split()).check())
    assert all(part in text for part in parts), text


def test_an_option_that_nobody_set_is_as_the_scheme_wants_it(tmp_path):
    assert load([], ["--scheme.name", "gemma"]).model.norm_offset
    config = load([], ["--scheme.name", "gemma", "--model.norm-offset", "false"])
    assert "scheme gemma needs model.norm_offset true" in one_line(config.check)


def test_norms_that_scale_by_one_plus_w_start_at_zero():
    recipe = load([], ["--model.norm-offset", "true"]).check()
    assert recipe.weights["norm_scale"].mean == 0.0


# ---------------------------------------------------------------------------------------------- the rest


def test_model_section_holds_the_geometry():
    """Field by field, so that a new size cannot be forgotten."""
    own = {f.name: f.default for f in dataclasses.fields(configs.ModelConfig)}
    for f in dataclasses.fields(Geometry):
        assert f.name in own
        if f.default is not dataclasses.MISSING:
            assert own[f.name] == f.default


def test_model_section_holds_the_module_options():
    from deepinit.nn import Decoder

    sizes = {f.name for f in dataclasses.fields(Geometry)}
    own = {f.name for f in dataclasses.fields(configs.ModelConfig)} - sizes - {"norm_placement"}
    assert own == set(Decoder.OPTIONS)


def test_every_field_is_described():
    rows = configs.describe()
    assert len(rows) == sum(len(loader.types_of(s)) for s in loader.types_of(Config).values())
    assert all(meaning.endswith(".") for *_, meaning in rows)


def test_replace():
    config = Config().replace(train__steps=3, scheme__name="rezero")
    assert (config.train.steps, config.scheme.name) == (3, "rezero")
