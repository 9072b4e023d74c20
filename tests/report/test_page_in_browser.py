"""The report in a real browser, where there is one: a single launch for all tests."""

import html
import json
import re
import shutil
import subprocess

import pytest
from made_up_results import made_up

from covon_avalanche.report import results_frame, write_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")

# Holds the report in two frames, as wide as a phone and a screen, so that scripts may look inside.
OUTER = """<!DOCTYPE html><meta charset="utf-8"><body>
<iframe style="border:0;width:360px;height:800px" srcdoc="{page}"></iframe>
<iframe style="border:0;width:1280px;height:800px" srcdoc="{page}"></iframe>
<pre id="found"></pre>
<script>
window.onload = function () {{
  var frames = Array.from(document.querySelectorAll("iframe"), function (f) {{
    return f.contentWindow; }});
  var page = frames[1].document;
  var found = {{ layout: frames.map(function (f) {{ return layout(f.document); }}),
                 sorted: sorted(page) }};
  document.getElementById("found").textContent = JSON.stringify(found);
}};
function layout(page) {{
  var root = page.documentElement, wide = page.querySelector(".scroll"), out = [];
  page.querySelectorAll("body *").forEach(function (e) {{
    if (e.closest(".scroll")) {{ return; }}
    if (e.getBoundingClientRect().right > root.clientWidth + 0.5) {{ out.push(e.outerHTML); }}
  }});
  return {{ page: root.scrollWidth, window: root.clientWidth, out: out,
            table: wide.scrollWidth, box: wide.clientWidth }};
}}
function sorted(page) {{
  var table = page.querySelector("table.sortable"), steps = [];
  function state() {{
    steps.push({{
      names: Array.from(table.tBodies[0].rows, function (r) {{
        return r.querySelector(".name").textContent; }}),
      sort: Array.from(table.tHead.rows[0].cells, function (h, i) {{
        return [i, h.getAttribute("aria-sort")]; }}).filter(function (s) {{ return s[1]; }})
    }});
  }}
  state();
  var buttons = table.tHead.querySelectorAll("button");
  [1, 1, 0, 4].forEach(function (column) {{
    buttons[column].focus();
    if (page.activeElement !== buttons[column]) {{ throw new Error("no focus"); }}
    buttons[column].click();
    state();
  }});
  return steps;
}}
</script>"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the scripts see in a report with long names, many domains and two comparisons."""
    results = [
        made_up(name, seed, [[0.9 - drop, 0.1], [0.8 - drop * (seed + 1), 0.9]], kind=kind)
        for name, drop, kind in (
            ("a-strategy-with-a-very-long-name-indeed", 0.01, "covon"),
            ("<b>x", 0.02, "replay"),
            ("zero", 0.03, "finetune"),
        )
        for seed in range(3)
    ]
    results.append(made_up("joint", 0, [None, [0.95, 0.95]], kind="joint"))
    many = [[[i / 40] * 30] * 30 for i in range(3)]
    results += [made_up(f"strategy {i}", 0, m, recipe="x" * 60) for i, m in enumerate(many)]
    folder = tmp_path_factory.mktemp("report")
    page = write_report(results_frame(results), folder).read_text(encoding="utf-8")
    outer = folder / "outer.html"
    outer.write_text(OUTER.format(page=html.escape(page)), encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    options += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", outer.as_uri()]
    done = subprocess.run([BROWSER, *options], capture_output=True, text=True, timeout=120)
    text = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert text, done.stderr
    assert "CONSOLE" not in done.stderr
    return json.loads(html.unescape(text.group(1)))


def test_the_page_never_scrolls_sideways(found):
    for layout, width in zip(found["layout"], (360, 1280), strict=True):
        assert layout["page"] <= layout["window"] <= width
        assert layout["out"] == []
    phone = found["layout"][0]
    assert phone["table"] > phone["box"]  # the table scrolls in its own box


def test_a_heading_sorts_and_says_so(found):
    a, b, joint, zero = "a-strategy-with-a-very-long-name-indeed", "<b>x", "joint", "zero"
    assert [(step["names"], step["sort"]) for step in found["sorted"]] == [
        ([joint, a, b, zero], [[1, "descending"]]),  # by accuracy, as it was written
        ([zero, b, a, joint], [[1, "ascending"]]),
        ([joint, a, b, zero], [[1, "descending"]]),
        ([b, a, joint, zero], [[0, "ascending"]]),  # by name
        ([a, b, zero, joint], [[4, "descending"]]),  # by BWT, which offline training has not
    ]
