"""The browser of samples in a report: filter, sort, and read any trained sample, by policy version.

The samples are in the page as compressed JSON, which its script unpacks. Where they are too many
for one page, pages of their own beside the report have them, a range of steps each, from the last
step on, as many as a reader can wait for. One page at a time is in memory.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from ray_apr.run.trained_samples import read_step, saved_steps
from ray_apr.tools.report.figures import esc
from ray_apr.tools.report.page import page
from ray_apr.tools.samples import Decode, pieces_of, tokenizer_of

_MOST_CHARACTERS = 6_000_000
"""Of the texts of one page."""
_MOST_PAGES = 4
_LONGEST_ROW = 20_000
"""Characters that a page has of a dataset's row."""


def sample_browser(folder: Path, out: Path) -> str:
    """The section of a report with the samples of a run, the last ones of a long run; nothing if it
    has saved none.

    Args:
        folder: Of the run.
        out: Of the report, beside which further pages go.
    """
    steps = saved_steps(folder)
    if not steps:
        return ""
    title = "<h2>Read the samples</h2>"
    broken: list[int] = []
    pages = _pages(folder, steps[::-1], tokenizer_of(folder), broken)
    newest, second = next(pages, []), next(pages, None)
    oldest, body = newest[-1]["step"] if newest else steps[-1], ""
    if second is None:
        body = _browser(newest)
    else:
        rest = itertools.islice(pages, _MOST_PAGES - 2)
        links = []
        for rows in itertools.chain([newest, second], rest):
            oldest = rows[-1]["step"]
            links.append(_write_page(folder, out, rows))
        body = f'<ul class="panel pages">{"".join(links)}</ul>'
    notes = [f"the files of steps {', '.join(map(str, broken))} cannot be read"] if broken else []
    if oldest > steps[0] and second is not None:
        notes.append(f"samples before step {oldest}: python -m ray_apr samples {folder} --step K")
    return title + body + "".join(f'<p class="empty">{esc(note)}</p>' for note in notes)


def _write_page(folder: Path, out: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a page of its own; returns a link to it."""
    first, last = rows[-1]["step"], rows[0]["step"]
    file = out.parent / f"{out.stem}_samples" / f"steps-{first:06d}-{last:06d}.html"
    file.parent.mkdir(exist_ok=True)
    heading = f"samples of steps {first} to {last}"
    text = page(heading, folder.name, _browser(rows), style=STYLE, scripts=[SCRIPT])
    file.write_text(text, encoding="utf-8")
    link = quote(f"{file.parent.name}/{file.name}")
    return f'<li><a href="{esc(link)}">steps {first} to {last}</a></li>'


def _pages(
    folder: Path, steps: Sequence[int], decode: Decode | None, broken: list[int]
) -> Iterator[list[dict[str, Any]]]:
    """Rows of pages, whole steps each, in the order of the steps.

    Args:
        folder: Of the run.
        steps: Whose samples are saved.
        decode: Of the run's tokenizer.
        broken: Gets the steps whose files cannot be read.
    """
    rows: list[dict[str, Any]] = []
    num_characters = 0
    for step in steps:
        try:
            samples = read_step(folder, step)
        except (OSError, pa.ArrowInvalid):
            broken.append(step)
            continue
        new = [_row(sample, decode) for sample in samples]
        size = sum(map(_size, new))
        if rows and num_characters + size > _MOST_CHARACTERS:
            yield rows
            rows, num_characters = [], 0
        rows += new
        num_characters += size
    if rows:
        yield rows


def _size(row: Mapping[str, Any]) -> int:
    texts = sum(len(text) for _, _, text in row["pieces"])
    return len(row["prompt"]) + len(row["row"]) + texts


def _row(sample: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    """What the page has of a sample."""
    return {
        "step": sample["step"],
        "id": sample["sample_id"],
        "group": sample["group_id"],
        "prompt": sample["prompt"],
        "row": sample["prompt_row"][:_LONGEST_ROW],
        "reward": sample["reward"],
        "parts": sample["reward_metrics"],
        "tokens": sample["num_generated"],
        "masked": sample["num_masked_tokens"],
        "age": sample["staleness"],
        "stops": sample["num_interruptions"],
        "turns": sample["num_turns"],
        "end": sample["finish_reason"],
        "pieces": [[p.policy_version, p.is_generated, p.text] for p in pieces_of(sample, decode)],
    }


def _browser(rows: Sequence[Mapping[str, Any]]) -> str:
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return f'<div class="panel samples"></div><script type="text/plain">{packed}</script>'


STYLE = """
.pages { padding: 10px 14px 10px 32px; }
.samples .filters { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: end; }
.samples label { color: var(--soft); font-size: 13px; }
.samples input, .samples select, .samples button { font: inherit; color: var(--text);
  background: var(--bg); border: 1px solid var(--line); border-radius: 5px; padding: 2px 6px; }
.samples input[type=number] { width: 84px; } .samples input[type=search] { width: 170px; }
.samples label > * { display: block; } .samples label.check > * { display: inline; }
.samples tbody tr { cursor: pointer; } .samples tbody tr:hover, .samples tr.open {
  background: var(--bg); }
.samples tbody td:first-child { white-space: nowrap; }
.samples td.text { max-width: 330px; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
.samples pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0 12px;
  font: 13px/1.55 ui-monospace, "DejaVu Sans Mono", monospace; }
.samples pre span.said { font-style: italic; opacity: 0.75; }
.samples .key span { border-radius: 3px; padding: 1px 6px; margin-right: 6px; font-size: 13px; }
.samples .more { margin: 8px 0; color: var(--soft); }
"""

SCRIPT = """
const PAGE = 25, HUES = [210, 30, 140, 280, 0, 55, 175, 320];
const make = (tag, cls, text) => { const e = document.createElement(tag);
  if (cls) e.className = cls; if (text !== undefined) e.textContent = text; return e; };
const paint = (e, version) => { if (version === null) return;
  e.style.background = `hsla(${HUES[version % HUES.length]}, 70%, 55%, 0.28)`; };
for (const box of document.querySelectorAll(".samples")) {
  const bytes = Uint8Array.from(atob(box.nextElementSibling.textContent), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  new Response(stream).json().then(rows => browse(box, rows));
}
function browse(box, rows) {
  const say = r => r.pieces.map(p => p[2]).join("");
  const filters = make("div", "filters"), count = make("p", "more"), table = make("table");
  const one = make("div"), more = make("button", "", "show more");
  const field = (name, input) => { const l = make("label", "", name); l.append(input);
    filters.append(l); input.addEventListener("input", () => { shown = PAGE; draw(); });
    return input; };
  const choose = (name, options) => { const s = make("select");
    for (const [v, t] of options) { const o = make("option", "", t); o.value = v; s.append(o); }
    return field(name, s); };
  const number = name => { const i = make("input"); i.type = "number"; i.step = "any";
    return field(name, i); };
  const steps = [...new Set(rows.map(r => r.step))].sort((a, b) => b - a);
  const step = choose("step", [["", "all"], ...steps.map(s => [s, s])]);
  const order = choose("first", [["worst", "worst reward"], ["best", "best reward"],
    ["long", "longest"], ["short", "shortest"], ["old", "stalest"], ["late", "latest step"]]);
  const low = number("reward from"), high = number("to"), least = number("tokens from");
  const stopped = make("input"); stopped.type = "checkbox";
  const search = make("input"); search.type = "search"; field("text", search);
  field("interrupted", stopped).parentElement.className = "check";
  const KEYS = {worst: r => r.reward, best: r => -r.reward, long: r => -r.tokens,
    short: r => r.tokens, old: r => -(r.age ?? -1), late: r => -r.step};
  const ok = r => (step.value === "" || r.step === +step.value)
    && (low.value === "" || r.reward >= +low.value)
    && (high.value === "" || r.reward <= +high.value)
    && (least.value === "" || r.tokens >= +least.value) && (!stopped.checked || r.stops > 0)
    && (search.value === "" || (r.id + r.prompt + say(r)).includes(search.value));
  let shown = PAGE, open = null;
  more.addEventListener("click", () => { shown += PAGE; draw(); });
  function draw() {
    const key = KEYS[order.value], found = rows.filter(ok).sort((a, b) => key(a) - key(b));
    count.textContent = `${found.length} of ${rows.length} samples`;
    table.replaceChildren(); const head = table.createTHead().insertRow();
    for (const name of ["sample", "step", "reward", "tokens", "stale", "stopped", "response"])
      head.append(make("th", "", name));
    const body = table.createTBody();
    for (const r of found.slice(0, shown)) {
      const line = body.insertRow(); line.tabIndex = 0;
      if (r === open) line.className = "open";
      for (const v of [r.id, r.step, +r.reward.toPrecision(4), r.tokens, r.age ?? "–", r.stops])
        line.append(make("td", "", v));
      line.append(make("td", "text", say(r)));
      const show = () => { open = r; read(r); draw(); one.scrollIntoView({block: "nearest"}); };
      line.addEventListener("click", show);
      line.addEventListener("keydown", e => { if (e.key === "Enter") show(); });
    }
    more.hidden = found.length <= shown;
  }
  function read(r) {
    const parts = Object.entries(r.parts).map(([k, v]) => `, ${k} ${v}`).join("");
    const masked = r.masked ? `, ${r.masked} of them masked` : "";
    one.replaceChildren(make("h3", "", r.id), make("p", "more",
      `step ${r.step}; reward ${r.reward}${parts}; ${r.tokens} tokens${masked}; ended by ${r.end};`
      + ` staleness ${r.age ?? "none in the loss"}; interrupted ${r.stops} times;`
      + ` turns ${r.turns}; group ${r.group}`));
    one.append(make("div", "title", "prompt"), make("pre", "", r.prompt));
    const text = make("pre", "response"), key = make("p", "key"), seen = new Set();
    for (const [version, made, words] of r.pieces) {
      const e = make("span", made ? "" : "said", words); paint(e, made ? version : null);
      e.title = made ? `policy version ${version ?? "unknown"}` : "said by the environment";
      text.append(e);
      if (made && version !== null && !seen.has(version)) { seen.add(version);
        const k = make("span", "", `version ${version}`); paint(k, version); key.append(k); }
    }
    one.append(make("div", "title", "response"), text, key);
    const row = make("details"); row.append(make("summary", "", "row of the dataset"),
      make("pre", "", r.row)); one.append(row);
  }
  box.append(filters, count, table, more, one); draw();
}
"""
