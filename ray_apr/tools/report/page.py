"""The page around charts and tables: one file, no outside resource, light and dark.

Plotly's own code is in the page (4.8 MB), so that figures can be zoomed without a network. The
page's content security policy names the scripts that run by their hashes: no text of a run
becomes a script, and nothing is fetched or sent.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence

from plotly.offline import get_plotlyjs

from ray_apr.tools.report.figures import esc

_DRAW = """
for (const box of document.querySelectorAll(".plot")) {
  const {data, layout} = JSON.parse(box.nextElementSibling.textContent);
  Plotly.newPlot(box, data, layout, {
    responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"]});
}
"""

_STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --panel: #ffffff; --text: #1c2430; --soft: #5d6878;
  --line: #e1e5ea; --bad: #d1343f; --warn: #fff3d6; --warn-line: #e3b341; }
@media (prefers-color-scheme: dark) { :root { --bg: #0f1319; --panel: #181e27; --text: #e6eaf0;
  --soft: #97a3b4; --line: #2a323e; --bad: #f0636d; --warn: #35290f; --warn-line: #8a6a1f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 34px 0 10px; }
.sub { color: var(--soft); margin: 0 0 18px; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(184px, 1fr)); gap: 10px; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 14px; }
.card b { display: block; font-size: 18.5px; font-weight: 600; line-height: 1.35;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.card span { color: var(--soft); font-size: 13px; display: block; }
.card.bad b { color: var(--bad); }
.warnings { background: var(--warn); border: 1px solid var(--warn-line); border-radius: 8px;
  margin: 16px 0 0; padding: 10px 14px 10px 32px; overflow-wrap: anywhere; }
figure, .panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  margin: 12px 0 0; padding: 12px 14px 6px; overflow-x: auto; }
.title { font-weight: 600; }
.empty { color: var(--soft); margin: 4px 0 12px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
  gap: 0 12px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 500; font-size: 13px; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.meter { width: 34%; } .meter i { display: block; height: 10px; margin-top: 6px;
  border-radius: 3px; min-width: 1px; }
details summary { cursor: pointer; font-weight: 600; padding: 2px 0 6px; }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; }
footer { color: var(--soft); font-size: 13px; margin-top: 30px; }
"""


def page(
    title: str, subtitle: str, body: str, *, style: str = "", scripts: Sequence[str] = ()
) -> str:
    """Return a whole HTML page.

    Args:
        title: Text.
        subtitle: Text.
        body: Markup.
        style: What its markup needs beside the style of all pages.
        scripts: What its markup needs beside plots.
    """
    scripts = [*([get_plotlyjs(), _DRAW] if 'class="plot"' in body else []), *scripts]
    allowed = " ".join(map(_hash, scripts)) or "'none'"
    policy = f"style-src 'unsafe-inline'; img-src data: blob:; script-src {allowed}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        f"content=\"default-src 'none'; {policy}\">"
        f"<title>{esc(title)}</title><style>{_STYLE}{style}</style></head><body><main>"
        f'<h1>{esc(title)}</h1><p class="sub">{esc(subtitle)}</p>{body}'
        "<footer>Made by ray_apr from the files of the run folder. Times are seconds since the run "
        f"began.</footer></main>{''.join(f'<script>{text}</script>' for text in scripts)}"
        "</body></html>\n"
    )


def _hash(script: str) -> str:
    """What a content security policy allows a script by."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def cards(items: Iterable[tuple[str, str, str, bool]]) -> str:
    """Cards of (name, value, remark, is it bad)."""
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card{" bad" if bad else ""}"><span>{esc(name)}</span><b>{esc(value)}</b>'
            f"<span>{esc(remark)}</span></div>"
            for name, value, remark, bad in items
        )
        + "</div>"
    )


def warning_list(warnings: Sequence[str]) -> str:
    """A box of warnings; nothing if there are none."""
    if not warnings:
        return ""
    items = "".join(f"<li>{esc(text)}</li>" for text in warnings)
    return f'<ul class="warnings">{items}</ul>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts; all columns but the first hold numbers."""
    top = "".join(f"<th{_number(i)}>{esc(text)}</th>" for i, text in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(f"<td{_number(i)}>{esc(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="panel"><table><tr>{top}</tr>{body}</table></div>'


def _number(column: int) -> str:
    return ' class="n"' if column else ""
