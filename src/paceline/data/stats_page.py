"""The page of `paceline data stats`: a length histogram, what each `max_length` cuts, tables; one
HTML file, opens offline."""

from html import escape
from typing import Any

from paceline.data.stats_text import HEADS, facts, limit_rows, overlong_text

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 22, 40

_STYLE = """
:root { --bg:#f6f7f9; --panel:#fff; --ink:#1b2430; --soft:#5c6878; --line:#dfe4ea; --c1:#2563a8;
  --c2:#d9772b; }
@media (prefers-color-scheme: dark) { :root { --bg:#11151b; --panel:#191f27; --ink:#e4e9ef;
  --soft:#93a0b0; --line:#2f3843;
  --c1:#6aa9ee; --c2:#f0a062; } }
* { box-sizing:border-box; } body { margin:0; background:var(--bg); color:var(--ink); font:15px/1.5
  system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif; }
main { max-width:1160px; margin:0 auto; padding:36px 24px 56px; }
h1 { margin:4px 0 14px; font-size:27px; overflow-wrap:anywhere; }
.eyebrow { color:var(--soft); font-size:12px; letter-spacing:.08em; text-transform:uppercase; }
dl { display:grid; grid-template-columns:max-content 1fr; gap:2px 18px; margin:0 0 22px; }
dt { color:var(--soft); } dd { margin:0; }
.plots { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));
  gap:18px; margin-bottom:18px; }
figure, .table { margin:0 0 18px; background:var(--panel); border:1px solid var(--line);
  border-radius:12px; padding:16px 18px;
  overflow-x:auto; }
.plots figure { margin:0; } figcaption { font-weight:600; margin-bottom:8px; }
svg { display:block; width:100%; height:auto; font-size:11.5px; }
svg text { fill:var(--soft); } .grid { stroke:var(--line); } .bar { fill:var(--c1); }
.limit { stroke:var(--c2); stroke-dasharray:5 4; }
.cut { fill:none; stroke:var(--c1); stroke-width:2; } .lost { fill:none; stroke:var(--c2);
  stroke-width:2; }
.key { display:inline-block; width:14px; height:3px; margin:0 6px 0 14px; vertical-align:middle; }
.legend { color:var(--soft); font-size:13px; margin:8px 0 0; }
table { width:100%; border-collapse:collapse; font-size:14px; font-variant-numeric:tabular-nums; }
th, td { padding:5px 10px; text-align:right; border-bottom:1px solid var(--line);
  white-space:nowrap; }
th { color:var(--soft); font-weight:500; } .text { text-align:left; white-space:normal;
  overflow-wrap:anywhere; }
"""


def render(result: dict[str, Any]) -> str:
    """The whole page. ``result``: as :func:`paceline.data.stats.dataset_stats` gives it, with the
    dataset's name."""
    told = "".join(
        f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in facts(result)
    )
    legend = (
        '<p class="legend"><i class="key" style="background:var(--c1)"></i>samples that are longer'
        '<i class="key" style="background:var(--c2)"></i>tokens lost</p>'
    )
    plots = (
        "<figure><figcaption>Samples by length in"
        f" tokens</figcaption>{_bars(result)}</figure><figure><figcaption>What each max_length"
        f" would cut</figcaption>{_curves(result)}{legend}</figure>"
    )
    head = "".join(f"<th>{escape(one)}</th>" for one in HEADS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in limit_rows(result)
    )
    limits = (
        f'<div class="table"><table><tr>{head}</tr>{rows}</table><p'
        f' class="legend">{escape(overlong_text(result))}</p></div>'
    )
    meta = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,'
        ' initial-scale=1"><meta name="color-scheme" content="light'
        f' dark"><title>{escape(result["dataset"])} · Paceline</title>'
    )
    title = f'<div class="eyebrow">paceline data stats</div><h1>{escape(result["dataset"])}</h1>'
    body = (
        f"<main>{title}<dl>{told}</dl><div"
        f' class="plots">{plots}</div>{limits}{_repeats(result)}</main>'
    )
    return (
        "<!DOCTYPE html>\n<html"
        f' lang="en"><head>{meta}<style>{_STYLE}</style></head><body>{body}</body></html>\n'
    )


def _repeats(result: dict[str, Any]) -> str:
    found = result["duplicates"]["most_repeated"]
    if not found:
        return ""
    rows = "".join(
        f'<tr><td>{one["times"]:,}</td><td class="text">{escape(one["text"])}</td></tr>'
        for one in found
    )
    return (
        '<div class="table"><table><tr><th>times</th><th class="text">most'
        f" repeated</th></tr>{rows}</table></div>"
    )


def _bars(result: dict[str, Any]) -> str:
    """The histogram. The last bin may hold all that is longer: its label says so."""
    bins = result["histogram"]
    most = max(one["samples"] for one in bins)
    step = (_WIDTH - _LEFT - _RIGHT) / len(bins)
    high = _HEIGHT - _TOP - _BOTTOM
    drawn = _grid([(share, f"{most * share:,.0f}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)])
    width = bins[0]["to"] - bins[0]["from"]
    every = max(1, len(bins) // 8)
    for place, one in enumerate(bins):
        tall = high * one["samples"] / most
        x, y = _LEFT + place * step, _HEIGHT - _BOTTOM - tall
        tip = f"{one['from']:,} to {one['to'] - 1:,} tokens: {one['samples']:,} samples"
        drawn.append(
            f'<rect class="bar" x="{x + 0.5:.1f}" y="{y:.1f}" width="{max(0.5, step - 1):.1f}"'
            f' height="{tall:.1f}"><title>{tip}</title></rect>'
        )
        is_rest = one["to"] - one["from"] > width
        if is_rest or (place % every == 0 and place < len(bins) - every // 2 - 1):
            text = f"{one['from']:,}+" if is_rest else f"{one['from']:,}"
            drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{text}</text>')
    limit = result["max_length"]
    if bins[0]["from"] <= limit <= bins[-1]["from"]:
        x = _LEFT + (limit - bins[0]["from"]) / width * step
        drawn.append(
            f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        )
        drawn.append(
            f'<text x="{x:.1f}" y="{_TOP - 7}" text-anchor="middle">max_length {limit:,}</text>'
        )
    return _svg("Samples by length in tokens", drawn)


def _curves(result: dict[str, Any]) -> str:
    """Share of samples cut and of tokens lost, over the limits of the table (evenly spaced, as
    their doublings are)."""
    limits = result["limits"]
    top = max(0.01, *(max(one["share_cut"], one["share_lost"]) for one in limits))
    step = (_WIDTH - _LEFT - _RIGHT - 40) / max(1, len(limits) - 1)

    def at(place: int, share: float) -> str:
        return (
            f"{_LEFT + 20 + place * step:.1f}"
            f" {_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share / top:.1f}"
        )

    drawn = _grid([(share, f"{100 * top * share:.3g} %") for share in (0.0, 0.25, 0.5, 0.75, 1.0)])
    for key, style, colour in (("share_cut", "cut", "c1"), ("share_lost", "lost", "c2")):
        path = "M" + "L".join(at(place, one[key]) for place, one in enumerate(limits))
        drawn.append(f'<path class="{style}" d="{path}"/>')
        for place, one in enumerate(limits):
            x, y = at(place, one[key]).split()
            tip = f"max_length {one['max_length']:,}: {100 * one[key]:.2f} %"
            drawn.append(
                f'<circle cx="{x}" cy="{y}" r="3.5"'
                f' fill="var(--{colour})"><title>{tip}</title></circle>'
            )
    for place, one in enumerate(limits):
        x = at(place, 0).split()[0]
        drawn.append(
            f'<text x="{x}" y="{_HEIGHT - 20}" text-anchor="middle">{one["max_length"]:,}</text>'
        )
    return _svg("What each max_length would cut", drawn)


def _grid(ticks: list[tuple[float, str]]) -> list[str]:
    drawn = []
    for share, text in ticks:
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share
        drawn.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        drawn.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return drawn


def _svg(title: str, drawn: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="{title}">{"".join(drawn)}</svg>'
    )
