from __future__ import annotations

import warnings
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest

from diffattn.audit.facts import Measured
from diffattn.report.figures import Points, asr_figure, history_points, layer_figure, sensitivity_points
from diffattn.report.panels import _around_zero
from diffattn.report.style import PALETTE, literal, looks
from diffattn.report.svg import inline_svg
from report.synthetic import BUDGETS, attack_facts, make_record

LOOKS = looks(["vit", "diffvit"])


def lines_of(figure):
    """(x, y, low, high) of every line with error bars."""
    found = []
    for container in figure.axes[0].containers:
        data, _, bars = container
        segments = np.array(bars[0].get_segments()) if bars else None
        ends = (None, None) if segments is None else (segments[:, 0, 1], segments[:, 1, 1])
        found.append((data.get_xdata(), data.get_ydata(), *ends))
    return found


def test_asr_figure_draws_the_recorded_shares_and_intervals():
    facts = [
        attack_facts(1000, 400, total=2000, eps=BUDGETS[0]),
        attack_facts(1000, 700, total=2000, eps=BUDGETS[2]),
    ]
    figure = asr_figure([(LOOKS[0], facts[::-1])], title="PGD")
    ((x, y, low, high),) = lines_of(figure)
    assert x == pytest.approx([1 / 255, 4 / 255])
    assert y == pytest.approx([40, 70])
    assert low == pytest.approx([100 * one.asr_low for one in facts])
    assert high == pytest.approx([100 * one.asr_high for one in facts])
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1/255", "4/255"]
    assert "Linf" in axes.get_xlabel()
    assert axes.get_ylabel() == "ASR (% of clean-correct)"
    assert figure.legends[0].get_texts()[0].get_text() == "vit (n = 1000)"


def test_a_wide_range_of_budgets_is_logarithmic():
    budgets = [(f"{2**i}/255", 2**i / 255) for i in range(6)]
    figure = asr_figure([(LOOKS[0], [attack_facts(10, 5, total=20, eps=eps) for eps in budgets])], title="PGD")
    assert np.diff(lines_of(figure)[0][0]) == pytest.approx(1.0)
    assert "log scale" in figure.axes[0].get_xlabel()


def test_one_model_has_one_colour_everywhere_and_colours_differ():
    many = looks([f"m{index}" for index in range(9)])
    assert [look.color for look in many[:7]] == list(PALETTE)
    assert len({(look.color, look.marker, look.line) for look in many}) == 9


def test_layer_figure_takes_missing_values_and_a_log_axis_only_over_a_decade():
    points = Points(LOOKS[0], [0, 1, 2], [Measured(1.0, 0.9, 1.1), None, Measured(5.0)], "a")
    assert layer_figure([points], title="t", ylabel="y", positive=True).axes[0].get_yscale() == "linear"
    wide = Points(LOOKS[0], [0, 1], [Measured(1.0, -1.0, 1.1), Measured(50.0)], "a")
    axes = layer_figure([wide], title="t", ylabel="y", positive=True).axes[0]
    assert axes.get_yscale() == "log"
    assert "log scale" in axes.get_ylabel()
    other = layer_figure([points], title="t", ylabel="y", positive=True, alongside=[wide]).axes[0]
    assert other.get_yscale() == "log"


def test_sensitivity_points_split_the_whole_layer_from_its_heads():
    record = make_record(differential=True, depth=2)
    rows = [row for row in record.sensitivity if row.wrt == "input"]
    points = sensitivity_points(rows, LOOKS[0], "cos_theta")
    assert list(points.x) == [0, 1]
    assert points.y == [row.cos_theta for row in rows if row.head == "all"]
    assert len(points.dots) == 6


def test_alignment_is_drawn_near_enough_to_be_seen():
    def limits(value):
        line = Points(LOOKS[0], [0], [Measured(value, value - 0.01, value + 0.01)], "a", [(0, None), (0, 0.02)])
        return _around_zero([line])

    assert limits(0.005) == (-0.1, 0.1)
    assert limits(-0.3) == (-0.5, 0.5)
    assert limits(0.8) == (-1.05, 1.05)


def test_history_leaves_out_what_is_no_number():
    record = make_record()
    entries = (
        {"epoch": 1, "val_accuracy": 0.5},
        {"epoch": 2, "val_accuracy": None},
        {"epoch": "3", "val_accuracy": 1},
    )
    object.__setattr__(record, "history", entries)
    points = history_points(record, LOOKS[0], "val_accuracy", scale=100.0)
    assert points.x == [1.0]
    assert points.y == [Measured(50.0)]


def test_hostile_numbers_and_names_are_drawn_without_a_warning():
    strange = looks(["$\\frac{1}{0}$ _x_ 漢字 \x00 \u202e" + "w" * 300, "_hidden"])
    huge = [Measured(1e308, -1e308, 1e308), Measured(1e-320), Measured(3.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = layer_figure(
            [Points(look, [0, 10**18, 2], huge, literal(look.name)) for look in strange],
            title="$\\bad{",
            ylabel="^_",
            positive=True,
        )
        inline_svg(figure, prefix="f1", label="x")
    assert len(figure.legends[0].get_texts()) == 2


def test_figures_leave_matplotlibs_settings_alone():
    before = dict(mpl.rcParams)
    inline_svg(asr_figure([(LOOKS[0], [attack_facts(10, 5, total=20)])], title="PGD"), prefix="f1", label="x")
    assert dict(mpl.rcParams) == before


def test_inline_svg_is_reproducible_labelled_and_has_its_own_ids():
    def drawn(prefix):
        figure = asr_figure([(LOOKS[0], [attack_facts(10, 5, total=20)])], title="<b>&")
        return inline_svg(figure, prefix=prefix, label='a "quoted" <label>')

    first, second = drawn("f1"), drawn("f2")
    assert first == drawn("f1")
    one, two = ElementTree.fromstring(first), ElementTree.fromstring(second)
    ids = [{element.get("id") for element in root.iter() if element.get("id")} for root in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    targets = {element.get("href") for element in one.iter() if element.get("href")}
    assert targets
    assert targets <= {f"#{name}" for name in ids[0]}
    assert one.get("role") == "img"
    assert one.get("aria-label") == 'a "quoted" <label>'
    assert not {"style", "metadata", "script", "image"} & {element.tag for element in one.iter()}
    assert "url(#" not in first.replace("url(#f1-", "")
