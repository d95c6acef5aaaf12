"""Plots: drawn in colors of the page, with alt texts and figures; lengths against their limits."""

import re
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from batchgen.reporting import figures, plots
from batchgen.reporting.lengths import Lengths
from batchgen.reporting.series import Timeline

SVG = "{http://www.w3.org/2000/svg}"


def times(bins=40, seconds=7200.0):
    wave = 100 + 10 * np.sin(np.arange(bins))
    gaps = np.where(np.arange(bins) < 3, np.nan, wave)
    return Timeline(
        edges=np.linspace(0, seconds, bins + 1),
        rates={"ok": wave, "preemptions": np.zeros(bins)},
        gauges={"running": gaps, "waiting": gaps / 2},
        quantiles={},
        phases=((0.0, 60.0, "start"), (7000.0, 7200.0, "drain")),
        restarts=(600.0,),
        deaths=(900.0,),
    )


def requests():
    lines = {"running": "at work", "waiting": "in the queue"}
    return plots.OverTime("requests", "Requests <&>", "says", lines, plots.short)


def test_a_plot_follows_the_theme_and_brings_no_letters():
    svg = plots.over_time(requests(), times(), times(6)).svg
    assert set(re.findall(r"var\(--([\w-]+)\)", svg)) >= {"series-1", "series-2", "start", "drain", "muted", "bad"}
    assert not re.findall("#[0-9a-fA-F]{6}", svg)
    assert "font-family" not in svg
    assert "DOCTYPE" not in svg
    assert "<style" not in svg
    assert "metadata" not in svg


def test_a_plot_is_told_to_who_does_not_see_it():
    plot = plots.over_time(requests(), times(), times(6))
    root = ET.fromstring(plot.svg)
    assert root.get("role") == "img"
    told = {one.get("id"): one.text for one in root if one.get("id")}
    assert [told[name] for name in root.get("aria-labelledby").split()] == ["Requests <&>", "says"]
    assert plot.legend == [("series-1", "at work", False), ("series-2", "in the queue", False)]
    assert plot.head == ["min", "at work", "in the queue"]
    assert len(plot.rows) == 6
    assert plot.rows[0][1] == "–"


def test_ids_of_two_plots_do_not_meet():
    one = plots.over_time(requests(), times(), times(6)).svg
    what = plots.OverTime("other", "Other", "says", {"ok": "docs/s"}, plots.short)
    other = plots.over_time(what, times(), times(6)).svg
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for svg, own in zip((one, other), ids, strict=True):
        assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg)) <= own
    assert plots.over_time(requests(), times(), times(6)).svg == one


@pytest.mark.parametrize(
    ("seconds", "unit"), [(20.0, "s"), (179.0, "s"), (181.0, "min"), (4 * 3600.0, "h"), (1e6, "d")]
)
def test_time_is_told_in_a_unit_that_fits(seconds, unit):
    what = plots.OverTime("speed", "Speed", "says", {"ok": "docs/s"}, plots.short)
    plot = plots.over_time(what, times(seconds=seconds), times(6, seconds))
    texts = [one.text for one in ET.fromstring(plot.svg).iter(f"{SVG}text")]
    assert sum(text.endswith(f" {unit}") for text in texts) == 1


def bars(lengths, **limits):
    counted = Lengths()
    counted.add(np.array(lengths))
    return figures._bars("x", "Prompts", counted, limits, "tokens")


def test_limits_are_lines_or_are_told():
    plot = plots.histogram(bars([100] * 50 + [900], max_model_len=1024, longest=131072))
    assert plot.legend == [("bad", "max_model_len 1,024", True)]
    assert plot.says == "median 100, longest 900; longest 131,072 lies beyond"
    assert sum(int(row[1]) for row in plot.rows) == 51


def test_a_few_long_ones_do_not_hide_the_others():
    found = bars([*range(500, 1500), 100_000])
    assert found.edges[-1] < 2000
    assert int(found.counts.sum()) == 1000
    assert found.says == "median 1,000, longest 100,000; 1 longer than shown"


@pytest.mark.parametrize("lengths", [[0] * 40, [1] * 40, [7] * 40, [10**6] * 40, list(range(40))])
def test_every_length_has_a_bar(lengths):
    found = bars(lengths)
    assert int(found.counts.sum()) == 40
    assert len(found.counts) <= 25
    plots.histogram(found)


def test_few_lengths_are_no_histogram():
    assert bars([5] * 39) is None


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.5, "0.5"), (7, "7"), (1500, "1,500"), (15_000, "15k"), (2_500_000, "2.5M")]
)
def test_numbers_of_an_axis_are_short(value, text):
    assert plots.short(value) == text
