"""The page around charts and tables: one file, no outside resource, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ray_apr.report.svg import esc

_STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --panel: #ffffff; --text: #1c2430; --soft: #5d6878;
  --line: #e1e5ea; --axis: #9aa4b2; --s1: #2f6fde; --s2: #e07b18; --s3: #2b9a66; --s4: #8452cf;
  --s5: #8f7f55; --bad: #d1343f; --generate: #2f6fde; --paused: #d1343f;
  --train: #2b9a66; --sync: #e07b18; --checkpoint: #8452cf;
  --wait: #c9d0d9; --idle: #c9d0d9; --other: #8f7f55; --start: #9a86b8; --back: #f0f2f5;
  --warn: #fff3d6; --warn-line: #e3b341; }
@media (prefers-color-scheme: dark) { :root { --bg: #0f1319; --panel: #181e27; --text: #e6eaf0;
  --soft: #97a3b4; --line: #2a323e; --axis: #66717f; --s1: #6aa0ff; --s2: #f2a14a; --s3: #4fc38a;
  --s4: #ab86ee; --s5: #b8a66f; --bad: #f0636d; --generate: #5b93f5; --paused: #f0636d;
  --train: #43b97f; --sync: #f2a14a; --checkpoint: #ab86ee;
  --wait: #465060; --idle: #465060; --other: #b8a66f; --start: #ab98c9; --back: #212936;
  --warn: #35290f; --warn-line: #8a6a1f; } }
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
figcaption { display: flex; flex-wrap: wrap; gap: 4px 18px; align-items: baseline;
  margin-bottom: 6px; }
.title { font-weight: 600; }
.legend { color: var(--soft); font-size: 13px; display: flex; flex-wrap: wrap; gap: 2px 14px; }
.key { white-space: nowrap; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; background: currentColor; }
.swatch.thin { opacity: .35; }
.empty { color: var(--soft); margin: 4px 0 12px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
  gap: 0 12px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg text.lane { fill: var(--text); }
svg text.label { font-size: 12.5px; }
svg text.note { font-size: 11px; paint-order: stroke; stroke: var(--panel); stroke-width: 3px; }
.grid { stroke: var(--line); } .axis { stroke: var(--axis); } .back { fill: var(--back); }
.limit { stroke: var(--axis); stroke-dasharray: 4 4; }
.frame { fill: none; stroke: var(--text); stroke-width: 1.2; }
.line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; }
.line.thin { stroke-width: 1; opacity: .35; } .line.bold { stroke-width: 2.4; }
.dot, .bar { fill: currentColor; }
.s1 { color: var(--s1); } .s2 { color: var(--s2); } .s3 { color: var(--s3); }
.s4 { color: var(--s4); } .s5 { color: var(--s5); }
.bad { color: var(--bad); } .generate { color: var(--generate); } .paused { color: var(--paused); }
.train { color: var(--train); } .sync { color: var(--sync); }
.checkpoint { color: var(--checkpoint); } .wait { color: var(--wait); }
.idle { color: var(--idle); }
.other { color: var(--other); } .start { color: var(--start); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 500; font-size: 13px; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.meter { width: 34%; } .meter i { display: block; height: 10px; margin-top: 6px;
  border-radius: 3px; background: currentColor; min-width: 1px; }
details summary { cursor: pointer; font-weight: 600; padding: 2px 0 6px; }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; }
footer { color: var(--soft); font-size: 13px; margin-top: 30px; }
"""


def page(title: str, subtitle: str, body: str) -> str:
    """Return a whole HTML page; `body` is markup, the rest is text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{esc(title)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{esc(title)}</h1><p class="sub">{esc(subtitle)}</p>{body}'
        "<footer>Made by ray_apr from the files of the run folder. Times are seconds since the run "
        "began.</footer></main></body></html>\n"
    )


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
