"""Pictures: labels that do not meet, axes that say what they hold, pages that stand by themselves."""

import json
import re

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import deepinit
from deepinit import Geometry, cli
from deepinit.report import html, plots, signals, tables
from deepinit.report.plots import Curve
from deepinit.signal.predict import predict

GEOMETRY = Geometry(num_layers=24, d_model=256, num_heads=4, d_ff=688, vocab_size=1000, max_seq_len=64)
NAMES = ("glorot_normal", "gpt2", "deepnorm", "rezero", "peri_ln", "subln", "megatron", "spike_no_more", "layerscale")


@pytest.fixture(scope="module")
def curves():
    return [Curve(name, predict(deepinit.recipe(name, GEOMETRY))) for name in NAMES]


PICTURES = {
    "variance": plots.variance,
    "relative_update": plots.relative_update,
    "correlation": plots.correlation,
    "exponents": plots.exponents,
}


@pytest.mark.parametrize("name", PICTURES)
def test_labels_do_not_meet_and_stay_on_the_page(curves, name):
    fig = PICTURES[name](curves)
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    [ax] = fig.axes
    texts = [t for t in ax.texts if t.get_text()]
    boxes = [Text.get_window_extent(t, canvas.get_renderer()) for t in texts]  # without the line to the curve
    page = fig.bbox
    for i, a in enumerate(boxes):
        assert page.x0 <= a.x0
        assert a.x1 <= page.x1 + 1
        assert page.y0 <= a.y0
        assert a.y1 <= page.y1
        for b in boxes[i + 1 :]:
            assert not (a.x0 < b.x1 - 1 and b.x0 < a.x1 - 1 and a.y0 < b.y1 - 1 and b.y0 < a.y1 - 1)
    assert ax.get_xlabel()
    assert ax.get_title(loc="left")
    assert ax.get_ylabel() or name == "exponents"


def test_every_line_is_named_and_the_still_ones_too(curves):
    [ax] = plots.variance(curves).axes
    assert {t.get_text() for t in ax.texts} == set(NAMES)
    [ax] = plots.relative_update(curves).axes
    assert any("rezero" in t.get_text() and "0 throughout" in t.get_text() for t in ax.texts)


def test_variance_has_a_log_axis_that_shows_level_as_level():
    level = Curve("deepnorm", predict(deepinit.recipe("deepnorm", GEOMETRY), input_variance=1.0, exponents=False))
    [ax] = plots.variance([level]).axes
    assert ax.get_yscale() == "log"
    low, high = ax.get_ylim()
    assert high / low >= 4
    assert ax.get_xlim()[0] <= 0


def test_a_stream_that_overflows_is_drawn_as_far_as_it_goes():
    p = predict(deepinit.recipe("glorot_normal", GEOMETRY, norm="none"), exponents=False)
    fig = plots.variance([Curve("no norm", p)])
    FigureCanvasAgg(fig).draw()
    fig = plots.relative_update([Curve("no norm", p)])
    FigureCanvasAgg(fig).draw()


def test_pictures_are_the_same_bytes_each_time(curves):
    assert plots.svg(plots.variance(curves[:3])) == plots.svg(plots.variance(curves[:3]))
    assert plots.png(plots.variance(curves[:3])) == plots.png(plots.variance(curves[:3]))


def test_a_report_stands_by_itself(curves, tmp_path):
    unit = [Curve(c.label, predict(c.predicted.recipe, input_variance=1.0, exponents=False)) for c in curves[:4]]
    page = html.of_predictions(str(tmp_path), curves[:4], unit)
    text = page.read_text()
    assert len(text.encode()) < 500_000
    links = re.findall(r"""(?:src|href)=["']([^"']+)""", text)
    assert all(link.startswith("#") for link in links)  # nothing is fetched
    assert "@media print" in text
    assert "<script" not in text
    for name in NAMES[:4]:
        assert name in text
    pictures = sorted(p.name for p in tmp_path.glob("*.png"))
    assert pictures == [
        "correlation.png",
        "exponents.png",
        "relative_update.png",
        "variance.png",
        "variance_from_1.png",
    ]
    data = json.loads((tmp_path / "report.json").read_text())
    assert [s["scheme"] for s in data["schemes"]] == list(NAMES[:4])


def test_text_is_escaped():
    page = html.Page("<b>", "a & b")
    page.table(("<th>",), [("<td>", 1.5, True, None)])
    assert "<b>" not in "".join(page.parts)
    assert html.cell("<td>") == '<td class="text">&lt;td&gt;</td>'
    assert "fails" in html.cell(False)


def test_the_four_curves_of_the_article(tmp_path, capsys):
    """Linear growth, 1 + a constant, bounded, identity."""
    args = ["predict", "--schemes", "glorot_normal,gpt2,deepnorm,rezero", "--report", str(tmp_path), "--json"]
    assert cli.main([*args, "--x0", "1"]) == 0
    found = {s["scheme"]: s for s in json.loads(capsys.readouterr().out)["schemes"]}
    assert found["gpt2"]["geometry"]["num_layers"] == 80
    glorot = np.array(found["glorot_normal"]["variance"][::2])
    late = np.polyfit(np.log(np.arange(40, 81)), np.log(glorot[40:]), 1)[0]
    assert late == pytest.approx(1, abs=0.2)
    gpt2 = np.array(found["gpt2"]["variance"])
    steps = np.diff(gpt2)[1::2]
    assert steps.max() / steps.min() < 1.2  # 80 equal parts of one constant
    np.testing.assert_allclose(found["deepnorm"]["variance"], 1, rtol=1e-4)
    assert set(found["rezero"]["variance"]) == {1.0}
    assert (tmp_path / "variance_from_1.png").exists()


# --- the terminal --------------------------------------------------------------------------------------------------


def test_sparklines():
    assert signals.spark([1, 1, 1]) == signals.spark([7, 7, 7])
    rising = signals.spark(np.geomspace(1, 1e6, 8))
    assert rising == signals.BARS
    assert signals.spark([1, np.inf, 0, 1])[1:3] == "! "
    assert len(signals.spark(np.ones(500), 40)) == 40
    a, b = np.geomspace(1, 10, 5), np.geomspace(10, 100, 5)
    assert signals.spark(a, like=b)[-1] == signals.spark(b, like=a)[0]  # one axis for both


def test_tables_fit_a_line(curves):
    import io

    out = tables.console(file=io.StringIO(), force_terminal=False)
    signals.prediction(out, curves[0].predicted)
    out.print(signals.predictions(out, curves))
    text = out.file.getvalue()
    assert max(map(len, text.splitlines())) <= 160
    assert "glorot_normal" in text
    assert "depth^" in text
