"""The command: help and wrong input at once and without jax, tables and JSON, exit statuses."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import deepinit
from deepinit.cli import VERBS, main
from tests.models import SMALL, recipe_of

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "configs" / "tiny.yaml")
# what a check needs to be quick
QUICK = ["--model.num-layers", "2", "--model.d-model", "32", "--model.num-heads", "4", "--model.d-ff", "64",
         "--model.max-seq-len", "16", "--data.seq-len", "16"]  # fmt: skip

WRONG = [
    # case B77: a misspelt key, value, scheme or option, and an option of another scheme
    ("chekc", "unknown command 'chekc'; did you mean 'check'?"),
    ("check --model.num_layer 3", "did you mean 'num_layers'?"),
    ("check --modle.num_layers 3", "'modle' is not a section; did you mean 'model'?"),
    ("train --scheme.name=gtp2", "scheme 'gtp2' is unknown; did you mean 'gpt2'?"),
    ("explain gtp2", "scheme 'gtp2' is unknown; did you mean 'gpt2'?"),
    ("explain --scheme.name megatron --scheme.args.share layer", "'share' is an option of rezero"),
    ("explain gpt2 --scheme.args.sdt 0.1", "option 'sdt' is unknown; did you mean 'std'?"),
    ("explain gpt2 --scheme.args.std wide", "scheme gpt2: std"),
    ("check --init.schem deepnorm", "'init' is not a section"),
    ("check --scheme.residual_scale 0.1", "section 'scheme' has no field 'residual_scale'"),
    ("check --model.d-model wide", "model.d_model: expected a whole number, got 'wide'"),
    ("check --model.dtype bfloat6", "model.dtype: 'bfloat6' is unknown; did you mean 'bfloat16'?"),
    ("check --scheme.sampler stock", "known: portable, jax"),
    ("check --config nowhere.yaml", "nowhere.yaml: no such config file"),
    ("check --model.num-layers", "--model.num-layers: needs a value"),
    ("check stray", "'stray' is not a flag"),
    ("schemes --nmes", "unknown flag '--nmes'; known: --names, --json"),
    ("check --scheme.name nowhere.at.all:own", "cannot import 'nowhere.at.all'"),
    ("check --scheme.name external", "a run needs a scheme"),
    # case B20: a scheme on a placement that it is not for
    ("check --scheme.name deepnorm --model.norm-placement pre", "scheme deepnorm needs norm 'post'"),
    ("train --scheme.name rezero --model.norm-placement pre", "scheme rezero needs norm 'none'"),
    ("check --scheme.name fixup --model.bias true", "scheme fixup needs model.bias false"),
    # case B78: a batch, heads or a vocabulary that the mesh does not divide
    ("check --train.batch-size 19 --mesh.data 4", "19 is not a multiple of mesh.data 4; nearest: 16 or 20"),
    ("train --model.num-heads 6 --model.d-model 96 --mesh.tensor 4", "num_heads: 6 is not a multiple of mesh.tensor 4"),
    ("check --model.vocab-size 50257 --mesh.tensor 8 --model.num-heads 8", "vocab_multiple 8 pads it to 50264"),
    ("check --mesh.data -3", "mesh.data: -3 is not a number of devices"),
]  # fmt: skip


def told(arguments):
    """(exit status, stdout, stderr) of the command, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments.split() if isinstance(arguments, str) else arguments)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(("arguments", "says"), WRONG)
def test_wrong_input_is_one_line(arguments, says):
    status, out, err = told(arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("deepinit: ")
    assert len(err.splitlines()) == 1
    assert says in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("init:\n  schem: deepnorm\n", "'init' is not a section"),
        ("scheme:\n  nam: deepnorm\n", "did you mean 'name'?"),
        ("scheme:\n  name: gtp2\n", "did you mean 'gpt2'?"),
        (
            "scheme:\n  name: gpt2\n  args:\n    residual_scale: 0.1\n",
            "scheme gpt2: option 'residual_scale' is unknown",
        ),
        ("scheme: [\n", "not YAML"),
        ("model:\n  num_layers: three\n", "expected a whole number"),
    ],
)
def test_wrong_files(tmp_path, text, says):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    status, _, err = told(["check", "--config", str(path)])
    assert status == 2
    assert len(err.splitlines()) == 1
    assert says in err


# Everything that can be told without jax is: one process goes through all of it, and jax is still not there.
def test_no_jax():
    lines = [(line, 2) for line, _ in WRONG]
    lines += [(line, 0) for line in ("", "--help", "--version", "schemes", "schemes --names", "schemes --json")]
    lines += [(line, 0) for line in ("explain gpt2", "explain --json", *(f"{verb} --help" for verb in VERBS))]
    script = (
        "import sys; from deepinit.cli import main\n"
        f"for line, status in {lines!r}:\n"
        "    assert main(line.split()) == status, line\n"
        "assert not {'jax', 'jaxlib', 'flax', 'orbax'} & set(sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


def test_as_a_process():
    command = [sys.executable, "-c", "from deepinit.cli import main; raise SystemExit(main())"]
    wrong = subprocess.run([*command, "check", "--scheme.name", "gtp2"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "deepinit: scheme 'gtp2' is unknown; did you mean 'gpt2'?\n"
    # a reader that has enough
    piped = subprocess.run(
        f"{sys.executable} -c '{command[2]}' schemes --names | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert piped.stdout == f"{deepinit.scheme_names()[0]}\n"
    assert piped.stderr == ""


def test_help():
    status, out, err = told("--help")
    assert (status, err) == (0, "")
    assert all(f"  {verb} " in out for verb in VERBS)
    assert told("") == (status, out, err)
    assert told("--version")[1] == f"deepinit {deepinit.__version__}\n"
    for verb in VERBS:
        out = told(f"{verb} --help")[1]
        assert out.startswith(f"usage: deepinit {verb}")
        if verb != "schemes":
            assert "--model.num-layers" in out
            assert "Transformer layers." in out


# --- schemes and explain -----------------------------------------------------------------------------------------


def test_scheme_names():
    assert told("schemes --names")[1].split() == list(deepinit.scheme_names())


def test_schemes():
    table = told("schemes")[1]
    listed = json.loads(told("schemes --json")[1])
    assert [s["name"] for s in listed] == list(deepinit.scheme_names())
    for s in listed:
        assert {"name", "aliases", "family", "norm", "residual", "source", "verified", "hyperparameters"} <= s.keys()
        assert s["name"] in table


@pytest.mark.parametrize("name", ["gpt2", "deepnorm", "fixup", "xavier", "megatron"])
def test_explain(name):
    sizes = [f"--model.{k.replace('_', '-')}={v}" for k, v in
             {"num_layers": 3, "d_model": 64, "num_heads": 8, "num_kv_heads": 4, "d_ff": 160, "vocab_size": 300,
              "max_seq_len": 32}.items()]  # fmt: skip
    recipe = recipe_of(name, SMALL.replace(vocab_size=300))
    status, out, _ = told(["explain", name, "--json", *sizes])
    data = json.loads(out)
    assert status == 0
    assert {"weights", "residual", "multipliers", "updates", "source", "geometry", "version"} <= data.keys()
    assert data == json.loads(json.dumps(recipe.to_json()))
    assert deepinit.Recipe.from_json(data) == recipe
    text = told(["explain", name, *sizes])[1]
    assert recipe.residual.formula in text
    assert recipe.source in text
    assert f"{recipe.weights['attn_out'].std:.6g}" in text
    assert f"{recipe.name}@{recipe.version}" in text
    # the name as an argument, a flag, or a flag with a value of its own
    assert told(["explain", "--scheme.name", name, "--json", *sizes])[1] == out
    assert told(["explain", "--json", *sizes, f"--scheme.name={name}"])[1] == out


def test_explain_allocates_nothing():
    sizes = ("--model.num-layers 126 --model.d-model 16384 --model.num-heads 128 --model.num-kv-heads 8 "
             "--model.d-ff 53248 --model.vocab-size 128256")  # fmt: skip
    status, out, _ = told(f"explain deepnorm {sizes}")
    assert status == 0
    assert "405,8" in out
    assert f"{252**0.25:.4g}" in out


def test_explain_reads_configs():
    status, out, _ = told(f"explain --config {TINY} --json --scheme.args.std 0.03")
    assert status == 0
    assert json.loads(out)["weights"]["attn_q"]["std"] == 0.03
    assert json.loads(out)["geometry"]["num_layers"] == 4


# --- check -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checked():
    """What `check --json` says of a quick model."""
    status, out, _ = told(["check", "--json", *QUICK])
    assert status == 0
    return json.loads(out)


def test_check(checked):
    assert {"ok", "digest", "scheme", "rows"} <= checked.keys()
    assert checked["ok"] is True
    assert checked["scheme"] == "small_init_scaled"
    assert len(checked["digest"]) == 32
    assert {r["path"] for r in checked["rows"]} >= {"token_embed", "layers/attention/attn_q", "lm_head"}
    for row in checked["rows"]:
        assert {"path", "role", "expected_std", "measured_std", "z", "ok"} <= row.keys()
        assert row["ok"], row


# case B44: one digest for every mesh and layout of the model
def test_check_on_a_mesh_prints_a_table(checked):
    flags = "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor -1 --model.scan false --model.remat full"
    status, out, err = told(["check", *QUICK, *flags.split()])
    assert (status, err) == (0, "")
    for row in checked["rows"]:
        assert row["path"].split("/")[-1] in out or row["path"].startswith("(")
    assert "layers_1/attention/attn_q" in out
    assert f"digest {checked['digest']}" in out
    assert "init ok: " in out


BROKEN = '''
from deepinit import register
from deepinit.recipe import Recipe
from deepinit.schemes.common import fixed


class Broken(Recipe):
    """Its closures are not those of its laws."""

    def initializer(self, role, layer=None, **more):
        inner = super().initializer(role, layer, **more)
        if role != "attn_out":
            return inner
        return lambda key, shape, dtype=None, out_sharding=None: inner(key, shape, dtype) * 1.5


@register("broken_outputs", source="a test")
def broken_outputs(g):
    """N(0, 0.02^2), the attention output 1.5 times as large."""
    return Broken(fixed(g, 0.02))
'''


# A user's own scheme, from a module of their own; and a state that is not what its recipe says: exit status 1
def test_a_failed_check(tmp_path, monkeypatch):
    (tmp_path / "own_schemes.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    status, out, err = told(["check", "--json", *QUICK, "--scheme.name", "own_schemes:broken_outputs"])
    assert (status, err) == (1, "")
    data = json.loads(out)
    assert data["ok"] is False
    assert [r["path"] for r in data["rows"] if not r["ok"]] == ["layers/attention/attn_out"]
