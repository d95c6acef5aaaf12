"""Plots as SVG to stand in a page: colors and letters are the page's, so they follow its theme.

matplotlib draws them. It is imported by the first plot, which takes a third of a second.
"""

import io
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
from numpy.typing import NDArray

from batchgen.reporting.series import Timeline, Values

_SIZE = (400, 190)  # units of the viewBox; letters have 11.5 of them
_AXES = (0.11, 0.14, 0.865, 0.81)  # left, bottom, width, height
# What matplotlib draws in these colors gets the page's variable of that name.
_COLORS = {
    "ink": "#010101", "muted": "#010102", "rule": "#010103", "series-1": "#010104", "series-2": "#010105",
    "series-3": "#010106", "start": "#010107", "drain": "#010108", "bad": "#010109",
}  # fmt: skip
_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"
_LINE = 1.6
_STRIP = (0.955, 1.0)  # of the height: phases of the run, above everything else
_FAR = 2  # a limit so many times beyond the longest would leave nothing to be seen of the others


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of the page. says: what it shows, in words. head, rows: its figures.

    legend: (variable of the color, text, whether it is a dashed line), where there is something to tell apart.
    """

    name: str
    title: str
    says: str
    svg: str
    legend: Sequence[tuple[str, str, bool]]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class OverTime:
    """What to draw of a timeline. lines: the label of each by its name in there. write: a value as text.

    per: values are drawn and written in units of so many. top: the axis reaches at least so far, in these. bars: values
    are counts of a bin.
    """

    name: str
    title: str
    says: str
    lines: Mapping[str, str]
    write: Callable[[float], str]
    per: float = 1.0
    top: float = 0.0
    bars: bool = False


def over_time(what: OverTime, fine: Timeline, coarse: Timeline) -> Plot:
    """The bins of `fine` as steps, phases as a strip, restarts and deaths as lines. Figures are those of `coarse`."""
    scale, unit = _time_unit(fine.seconds)
    edges = fine.edges / scale
    colors = dict(zip(what.lines, ("series-1", "series-2", "series-3"), strict=False))
    highest = max([what.top, *(float(np.nanmax(fine.values(name))) / what.per for name in what.lines)])
    with _axes(what.name) as axes:
        for begin, end, kind in fine.phases:
            axes.axvspan(begin / scale, end / scale, *_STRIP, color=_COLORS[kind], linewidth=0)
        for name in what.lines:
            _steps(
                axes,
                fine.values(name) / what.per,
                edges,
                color=_COLORS[colors[name]],
                bars=what.bars,
                alone=len(colors) == 1,
            )
        _lines(axes, [at / scale for at in fine.restarts], "muted")
        _lines(axes, [at / scale for at in fine.deaths], "bad")
        axes.set_xlim(0, edges[-1])
        _heights(axes, highest, what.write)
        _ticks(axes.xaxis, edges[-1], lambda value: f"{value:g}", unit)
        svg = _svg(axes, what.name, title=what.title, says=what.says)
    return Plot(
        what.name, what.title, what.says, svg,
        legend=[(colors[name], label, False) for name, label in what.lines.items()] if len(colors) > 1 else [],
        head=[unit, *what.lines.values()],
        rows=list(_rows(what, coarse, scale)),
    )  # fmt: skip


def _steps(axes: Any, values: Values, edges: Values, *, color: str, bars: bool, alone: bool) -> None:
    if bars:
        axes.stairs(values, edges, fill=True, color=color, linewidth=0)
        return
    if alone:
        axes.stairs(values, edges, fill=True, color=color, alpha=0.14, linewidth=0)
    axes.stairs(values, edges, baseline=None, color=color, linewidth=_LINE)


def _lines(axes: Any, places: Sequence[float], color: str) -> None:
    for at in places:
        axes.axvline(at, color=_COLORS[color], linewidth=1.1, dashes=(3, 2))


def _rows(what: OverTime, coarse: Timeline, scale: float) -> Iterator[list[str]]:
    for n, (begin, end) in enumerate(zip(coarse.edges[:-1], coarse.edges[1:], strict=True)):
        values = [float(coarse.values(name)[n]) / what.per for name in what.lines]
        told = ["–" if np.isnan(value) else what.write(value) for value in values]
        yield [f"{begin / scale:.3g} to {end / scale:.3g}", *told]


@dataclass(frozen=True, slots=True)
class Bars:
    """A histogram. edges: one more than counts. limits: lines to draw, by their label. unit: of a length."""

    name: str
    title: str
    says: str
    edges: Values
    counts: NDArray[np.int64]
    limits: Mapping[str, int]
    unit: str


def histogram(what: Bars) -> Plot:
    """How many have which length. A limit that is far beyond all lengths is told only."""
    right = float(what.edges[-1])
    near = {label: at for label, at in what.limits.items() if at <= _FAR * right}
    far = [f"{label} {at:,} lies beyond" for label, at in what.limits.items() if label not in near]
    says = "; ".join([what.says, *far])
    right = max([right, *(1.03 * at for at in near.values())])
    colors = dict(zip(near, ("bad", "series-2"), strict=False))
    with _axes(what.name) as axes:
        axes.stairs(what.counts, what.edges, fill=True, color=_COLORS["series-1"], linewidth=0)
        for label, at in near.items():
            _lines(axes, [at], colors[label])
        axes.set_xlim(min(0.0, what.edges[0]), right)
        _heights(axes, float(what.counts.max()), short)
        _ticks(axes.xaxis, right, short, "")
        svg = _svg(axes, what.name, title=what.title, says=says)
    rows = [
        [f"{begin:,.0f} to {end - 1:,.0f}" if end - begin > 1 else f"{begin:,.0f}", f"{count:,}"]
        for begin, end, count in zip(what.edges[:-1], what.edges[1:], what.counts, strict=True) if count
    ]  # fmt: skip
    legend = [(colors[label], f"{label} {at:,}", True) for label, at in near.items()]
    return Plot(what.name, what.title, says, svg, legend=legend, head=[what.unit, "documents"], rows=rows)


def short(value: float) -> str:
    """A number for an axis: 12,000 is 12k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if letter == "k" else 1):
            return f"{value / size:,.3g}{letter}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _time_unit(seconds: float) -> tuple[float, str]:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 3 * size:
            return size, unit
    return 1.0, "s"


@contextmanager
def _axes(name: str) -> Iterator[Any]:
    """Axes to draw on. name: of the plot, so that the same plot is the same text each time."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its advice on font caches is nothing for a run's log
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11.5, "axes.edgecolor": _COLORS["rule"],
        "xtick.color": _COLORS["rule"], "ytick.color": _COLORS["rule"], "xtick.labelcolor": _COLORS["muted"],
        "ytick.labelcolor": _COLORS["muted"], "grid.color": _COLORS["rule"], "grid.linewidth": 0.8,
        "axes.axisbelow": True, "axes.linewidth": 1.0,
    }  # fmt: skip
    with mpl.rc_context(settings):
        figure = Figure(figsize=(_SIZE[0] / 72, _SIZE[1] / 72))
        figure.patch.set_visible(False)
        axes = figure.add_axes(_AXES)
        axes.patch.set_visible(False)
        for side in ("top", "left", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(axis="y")
        axes.tick_params(length=0)
        axes.tick_params(axis="x", pad=6)
        yield axes


def _heights(axes: Any, highest: float, write: Callable[[float], str]) -> None:
    axes.set_ylim(0, highest * 1.08 or 1.0)
    _ticks(axes.yaxis, highest or 1.0, write, "", most=4)


def _ticks(axis: Any, last: float, write: Callable[[float], str], unit: str, most: int = 5) -> None:
    """Round numbers from 0 to `last`; the unit stands behind the last one."""
    from matplotlib.ticker import MaxNLocator

    values = [float(value) for value in MaxNLocator(most).tick_values(0, last) if 0 <= value <= last * 1.001]
    texts = [write(value) for value in values]
    axis.set_ticks(values, [*texts[:-1], f"{texts[-1]} {unit}".strip()])
    if values[-1] > (0.88 if unit else 0.97) * last:  # it would reach out of the plot
        axis.get_majorticklabels()[-1].set_ha("right")


def _svg(axes: Any, name: str, *, title: str, says: str) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    axes.figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ET.fromstring(buffer.getvalue().encode())  # noqa: S314  written a line above
    for above in list(root.iter()):
        for below in list(above):
            if below.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                above.remove(below)
    _tell(root, name, title=title, says=says)
    _name(root, name)
    return ET.tostring(root, encoding="unicode")


def _tell(root: ET.Element, name: str, *, title: str, says: str) -> None:
    """What somebody who does not see the plot is told."""
    root.attrib.clear()
    root.attrib.update({
        "viewBox": f"0 0 {_SIZE[0]} {_SIZE[1]}", "role": "img", "aria-labelledby": f"{name}-title {name}-says",
    })  # fmt: skip
    for kind, text in (("desc", says), ("title", title)):
        one = ET.Element(f"{{{_SVG}}}{kind}", {"id": f"{name}-{'says' if kind == 'desc' else kind}"})
        one.text = text
        root.insert(0, one)


def _name(root: ET.Element, name: str) -> None:
    """Ids that no other plot of the page has, where something refers to them; colors of the page; short numbers."""
    ours = {f"{name}-title", f"{name}-says"}
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', ET.tostring(root, encoding="unicode")))
    for one in root.iter():
        if "id" in one.attrib and one.attrib["id"] not in ours:
            was = one.attrib.pop("id")
            if was in used:
                one.attrib["id"] = f"{name}-{was}"
        if _HREF in one.attrib:
            one.attrib[_HREF] = one.attrib[_HREF].replace("#", f"#{name}-")
        if "clip-path" in one.attrib:
            one.attrib["clip-path"] = one.attrib["clip-path"].replace("#", f"#{name}-")
        for key in ("d", "x", "y", "transform"):
            if key in one.attrib:
                one.attrib[key] = re.sub(r"(\.\d\d)\d+", r"\1", one.attrib[key].replace("\n", ""))
        if one.attrib.get("transform", "").startswith("rotate(-0 "):
            del one.attrib["transform"]
        if "style" in one.attrib:
            one.attrib["style"] = _style(one.attrib["style"])


def _style(style: str) -> str:
    kept = [one.strip() for one in style.split(";") if one.strip() and not one.strip().startswith("font-family")]
    text = "; ".join(kept)
    for variable, color in _COLORS.items():
        text = text.replace(color, f"var(--{variable})")
    return text
