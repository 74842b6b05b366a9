# SPDX-License-Identifier: Apache-2.0
"""A timeline as a page that stands alone, drawn by plotly."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

from .._transform.budget import format_bytes
from .drawing import COLOURS, LABELS, unit_of
from .points import Over, Series
from .tables import Table

_MARKS = {"replay": "replays", "move": "moves out", "return": "returns"}

# What the library does not do: to draw no more points than a screen has, whatever is zoomed in to,
# and to find operators by name. Of a run of points that fall together, the first, the highest and
# the last are drawn.
_GLUE = """
const plot = document.getElementById('timeline');
const field = document.getElementById('search');
const whole = [data.x[0], data.x[data.x.length - 1]];
const used = data.x.map((_, i) => data.resident.reduce((sum, band) => sum + data[band][i], 0));
const height = used.map((bytes, i) => bytes + data.moved[i]);

function after(x) {  // how many points lie before x
  let low = 0, high = data.x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.x[middle] < x) low = middle + 1; else high = middle;
  }
  return low;
}

function visible(from, to) {
  const first = Math.max(0, after(from) - 1), end = Math.min(data.x.length, after(to) + 1);
  const many = Math.ceil((end - first) / 1500);
  const chosen = [];
  for (let i = first; i < end; i += many) {
    const last = Math.min(i + many, end) - 1;
    let top = i;
    for (let k = i; k <= last; ++k) if (height[k] > height[top]) top = k;
    chosen.push(i);
    if (top !== i) chosen.push(top);
    if (last !== i && last !== top) chosen.push(last);
  }
  return chosen;
}

function draw(from, to) {
  const chosen = visible(from, to);
  const x = chosen.map(i => data.x[i]);
  const sums = chosen.map(() => 0);
  const y = {};
  for (const band of data.bands) {
    y[band] = chosen.map((i, at) => (sums[at] += data[band][i]) / data.unit);
  }
  const drawn = [...data.bands].reverse().map(band => y[band]);
  drawn.push(chosen.map(i => used[i] / data.unit));
  const text = chosen.map(i => data.labels[data.what[i]]);
  Plotly.restyle(plot, {x: drawn.map(() => x), y: drawn, text: drawn.map(() => text)},
                 drawn.map((_, i) => i));
}

let shown = [...whole];
function redraw() {
  const [from, to] = plot.layout.xaxis.range;
  if (from === shown[0] && to === shown[1]) return;
  shown = [from, to];
  draw(from, to);
}
plot.on('plotly_relayout', redraw);
plot.on('plotly_doubleclick', () => { Plotly.relayout(plot, {'xaxis.range': [...whole]}); });
draw(...whole);

field.addEventListener('input', () => {
  const wanted = field.value.trim().toLowerCase();
  const matches = data.names.map(name => wanted !== '' && name.toLowerCase().includes(wanted));
  const at = [];
  let before = -1;
  for (let i = 0; i < data.what.length; ++i) {  // once for each time that it runs
    if (matches[data.what[i]] && data.what[i] !== before) at.push(i);
    before = data.what[i];
  }
  document.getElementById('count').textContent = wanted ? at.length + ' found' : '';
  Plotly.restyle(plot, {
    x: [at.map(i => data.x[i])],
    y: [at.map(i => used[i] / data.unit)],
  }, [data.bands.length + 1]);
});
"""

_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 16px; color: #222; background: #fff; }
h1 { font-size: 16px; font-weight: 600; overflow-wrap: anywhere; margin: 0 0 8px; }
input { font: inherit; width: min(32em, 80%); padding: 4px 8px; }
#count { margin-left: 8px; color: #555; }
table { border-collapse: collapse; } td, th { font-size: 13px; }
"""


def page(shown: Series, over: Over) -> str:
    """Return the page of a timeline.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "timeline(g).html() needs plotly. Install it with: pip install plotly", name=error.name
        ) from None
    plot = _figure(shown, over).to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id="timeline",
        config={
            "doubleClick": False,
            "displaylogo": False,
            "responsive": True,
            "modeBarButtonsToRemove": ["autoScale2d", "select2d", "lasso2d"],
        },
    )
    table = Table(
        "The largest tensors at the peak",
        "",
        ("made by", "bytes"),
        [(f"{t.operator} at {t.place}", format_bytes(t.nbytes)) for t in shown.tallest],
    )
    title = escape(f"{shown.name}: peak {format_bytes(shown.peak_bytes)}")
    data = json.dumps(_data(shown, over)).replace("<", "\\u003c")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body><h1>{title}</h1>"
        '<label>Find <input id="search" placeholder="an operator, a line, a module"></label>'
        f'<span id="count"></span>{plot}{table.html()}'
        f"<script>const data = {data};{_GLUE}</script></body></html>"
    )


def _lines(text: str) -> str:
    """Return what a place is called, in lines that a hover label has room for."""
    parts = re.split(r"\n| (?=\()| (?=at )", text)
    # A long path is broken after a dot, or else anywhere.
    lines = [line for part in parts for line in re.findall(r".{1,71}(?:[./]|$)|.{1,72}", part)]
    return "<br>".join(map(escape, lines))


def _bands(shown: Series) -> list[str]:
    """Return which bands there are, the lowest first."""
    return [band for band in LABELS if any(getattr(point, band) for point in shown.points)]


def _data(shown: Series, over: Over) -> dict[str, Any]:
    """Return the points in columns."""
    points = shown.points
    names: dict[str, int] = {}
    what = [names.setdefault(point.what or "the call begins", len(names)) for point in points]
    bands = _bands(shown)
    return {
        "unit": unit_of(shown.highest)[1],
        "bands": bands,
        "resident": [band for band in bands if band != "moved"],
        "x": [round(shown.x(over, point), 6) for point in points],
        "what": what,
        "names": [name.replace("\n", " ") for name in names],
        "labels": [_lines(name) for name in names],
        "moved": [0] * len(points),
        **{band: [getattr(point, band) for point in points] for band in bands},
    }


def _figure(shown: Series, over: Over) -> Any:
    """Return what the points are drawn into."""
    import plotly.graph_objects as go

    unit, size = unit_of(shown.highest)
    ends = [shown.x(over, shown.points[0]), shown.x(over, shown.points[-1])]
    figure = go.Figure()
    # The highest first, each down to zero: those after it cover what is theirs.
    for band in reversed(_bands(shown)):
        figure.add_trace(
            go.Scatter(
                name=LABELS[band],
                fill="tozeroy",
                fillcolor=COLOURS[band],
                line={"width": 0, "shape": "hv", "color": COLOURS[band]},
                mode="lines",
                hoverinfo="skip",
            )
        )
    figure.add_trace(
        go.Scatter(
            name="in use",
            mode="lines",
            line={"width": 1, "color": "#333333", "shape": "hv"},
            hovertemplate=f"%{{text}}<br>%{{y:.4g}} {unit} in use<extra></extra>",
            showlegend=False,
        )
    )
    figure.add_trace(
        go.Scattergl(
            name="found",
            mode="markers",
            marker={"size": 8, "color": COLOURS["budget"], "symbol": "circle-open"},
            hoverinfo="skip",
            showlegend=False,
        )
    )
    kinds = [kind for kind in _MARKS if any(mark.kind == kind for mark in shown.marks)]
    for row, kind in enumerate(kinds):
        marks = [mark for mark in shown.marks if mark.kind == kind]
        figure.add_trace(
            go.Scattergl(
                x=[shown.x(over, mark) for mark in marks],
                y=[-row] * len(marks),
                yaxis="y2",
                name=_MARKS[kind],
                mode="markers",
                marker={"symbol": "line-ns-open", "size": 12, "color": COLOURS[kind]},
                text=[
                    _lines(mark.name) + (f"<br>{format_bytes(mark.nbytes)}" if mark.nbytes else "")
                    for mark in marks
                ],
                hovertemplate="%{text}<extra></extra>",
                showlegend=False,
            )
        )
    if shown.budget is not None:
        figure.add_hline(
            y=shown.budget / size,
            line={"color": COLOURS["budget"], "dash": "dash", "width": 1.5},
            annotation_text=f"budget, {format_bytes(shown.budget)}",
            annotation_position="top right",
        )
    begins = shown.backward_from(over)
    if begins is not None:
        figure.add_vrect(
            x0=begins,
            x1=ends[1],
            fillcolor="#000000",
            opacity=0.06,
            line_width=0,
            layer="below",
            annotation_text="backward",
            annotation_position="top left",
        )
    tiers = ", and in tiers" if "moved" in _bands(shown) else ""
    figure.update_layout(
        template="plotly_white",
        height=560,
        margin={"l": 80, "r": 20, "t": 30, "b": 60},
        hovermode="x",
        hoverdistance=-1,
        hoverlabel={"align": "left", "namelength": -1},
        legend={"orientation": "h", "y": -0.14, "traceorder": "reversed"},
        xaxis={
            "title": {"text": "operators" if over == "operators" else "seconds"},
            "anchor": "y2",
            "range": ends,
        },
        yaxis={
            "title": {"text": f"{unit} resident{tiers}"},
            "domain": [0.2, 1],
            "range": [0, 1.05 * shown.highest / size],
            "fixedrange": True,
        },
        yaxis2={
            "domain": [0, 0.13],
            "range": [0.6 - max(len(kinds), 1), 0.6],
            "tickmode": "array",
            "tickvals": [-row for row in range(len(kinds))],
            "ticktext": [_MARKS[kind] for kind in kinds],
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        },
    )
    return figure
