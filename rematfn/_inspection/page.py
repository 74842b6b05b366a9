# SPDX-License-Identifier: Apache-2.0
"""A timeline as a page that stands alone, drawn by plotly."""

import textwrap
from collections.abc import Sequence
from html import escape
from itertools import accumulate
from typing import Any

from .._transform.budget import format_bytes
from .drawing import BUDGET_COLOUR, unit_of
from .points import BANDS, MARKS, Over, Point, Series

_MOST = 20_000  # points that are drawn

# What the library does not do: to find operators by name, each once for each time that it runs.
_SEARCH = """
const plot = document.getElementById('timeline');
const field = document.getElementById('search');
const used = plot.data.findIndex(trace => trace.name === 'in use');
const {x, y, text} = plot.data[used];
const what = text.map(label => label.replaceAll('<br>', ' ').toLowerCase());
field.addEventListener('input', () => {
  const wanted = field.value.trim().toLowerCase();
  const isOne = i => wanted !== '' && what[i].includes(wanted);
  const at = [...what.keys()].filter(i => isOne(i) && what[i] !== what[i - 1]);
  document.getElementById('count').textContent = wanted ? at.length + ' found' : '';
  Plotly.restyle(plot, {x: [at.map(i => x[i])], y: [at.map(i => y[i])]}, [used + 1]);
});
"""

_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 16px; color: #222; background: #fff; }
h1 { font-size: 16px; font-weight: 600; overflow-wrap: anywhere; margin: 0 0 8px; }
input { font: inherit; width: min(32em, 80%); padding: 4px 8px; }
#count { margin-left: 8px; color: #555; }
"""


def page(shown: Series, over: Over) -> str:
    """Return the page of a timeline."""
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
        config={"displaylogo": False, "responsive": True},
    )
    tallest = "\n".join(f"{format_bytes(nbytes):>12}  {made}" for nbytes, made in shown.tallest)
    title = escape(f"{shown.name}: peak {format_bytes(shown.peak_bytes)}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body><h1>{title}</h1>"
        '<label>Find <input id="search" placeholder="an operator, a line, a module"></label>'
        f'<span id="count"></span>{plot}<p>The largest tensors at the peak</p>'
        f"<pre>{escape(tallest)}</pre><script>{_SEARCH}</script></body></html>"
    )


def _label(text: str) -> str:
    """Return a text in lines that a hover label has room for."""
    return "<br>".join(map(escape, textwrap.wrap(text, 72, break_long_words=False)))


def _fewer(points: Sequence[Point]) -> list[Point]:
    """Return the points, or the highest of each run, if they are more than a browser can take."""
    run = -(-len(points) // _MOST)
    return [
        max(points[i : i + run], key=lambda point: point.used + point.moved)
        for i in range(0, len(points), run)
    ]


def _figure(shown: Series, over: Over) -> Any:
    import plotly.graph_objects as go

    unit, size = unit_of(shown.highest)
    points = _fewer(shown.points)
    x = [round(shown.x(over, point), 6) for point in points]
    figure = go.Figure()
    sums = [
        list(accumulate(getattr(point, band) / size for band in shown.bands)) for point in points
    ]
    # The highest first, each down to zero: those after it cover what is theirs.
    for i, band in reversed(list(enumerate(shown.bands))):
        figure.add_scatter(
            x=x,
            y=[of[i] for of in sums],
            name=BANDS[band][0],
            fill="tozeroy",
            fillcolor=BANDS[band][1],
            line={"width": 0, "shape": "hv", "color": BANDS[band][1]},
            mode="lines",
            hoverinfo="skip",
        )
    figure.add_scatter(
        x=x,
        y=[point.used / size for point in points],
        text=[_label(point.what) for point in points],
        name="in use",
        mode="lines",
        line={"width": 1, "color": "#333333", "shape": "hv"},
        hovertemplate=f"%{{text}}<br>%{{y:.4g}} {unit} in use<extra></extra>",
        showlegend=False,
    )
    figure.add_scattergl(  # what the search finds
        x=[],
        y=[],
        mode="markers",
        marker={"size": 8, "color": BUDGET_COLOUR, "symbol": "circle-open"},
        hoverinfo="skip",
        showlegend=False,
    )
    marks = shown.marks
    for row, (kind, marked) in enumerate(marks.items()):
        figure.add_scattergl(
            x=[shown.x(over, point) for point in marked],
            y=[-row] * len(marked),
            yaxis="y2",
            mode="markers",
            marker={"symbol": "line-ns-open", "size": 12, "color": MARKS[kind][1]},
            text=[_label(point.what) for point in marked],
            hovertemplate="%{text}<extra></extra>",
            showlegend=False,
        )
    if shown.budget is not None:
        figure.add_hline(
            y=shown.budget / size,
            line={"color": BUDGET_COLOUR, "dash": "dash", "width": 1.5},
            annotation_text=f"budget, {format_bytes(shown.budget)}",
            annotation_position="top right",
        )
    begins = shown.backward_from(over)
    if begins is not None:
        figure.add_vrect(
            x0=begins,
            x1=x[-1],
            fillcolor="#000000",
            opacity=0.06,
            line_width=0,
            layer="below",
            annotation_text="backward",
            annotation_position="top left",
        )
    tiers = ", and in tiers" if "moved" in shown.bands else ""
    figure.update_layout(
        template="plotly_white",
        height=560,
        margin={"l": 80, "r": 20, "t": 30, "b": 60},
        hovermode="x",
        hoverdistance=-1,
        hoverlabel={"align": "left"},
        legend={"orientation": "h", "y": -0.14, "traceorder": "reversed"},
        xaxis={"title": {"text": over if over == "operators" else "seconds"}, "anchor": "y2"},
        yaxis={
            "title": {"text": f"{unit} resident{tiers}"},
            "domain": [0.2, 1],
            "range": [0, 1.05 * shown.highest / size],
            "fixedrange": True,
        },
        yaxis2={
            "domain": [0, 0.13],
            "range": [0.6 - max(len(marks), 1), 0.6],
            "tickvals": [-row for row in range(len(marks))],
            "ticktext": [MARKS[kind][0] for kind in marks],
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        },
    )
    return figure
