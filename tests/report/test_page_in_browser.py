"""The report in a real browser, where there is one."""

import html
import json
import re
import shutil
import subprocess

import pytest
from made_up_results import made_up

from covon_avalanche.report import results_frame, write_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")

# Holds the report in a frame of a given width, so that its script may look into it.
FRAME = """<!DOCTYPE html><meta charset="utf-8"><body>
<iframe style="border:0;width:{width}px;height:800px" srcdoc="{page}"></iframe>
<script>
window.onload = function () {{
  var frame = document.querySelector("iframe").contentWindow, page = frame.document;
  var found = (function () {{ {look} }})();
  var place = document.createElement("pre");
  place.id = "found";
  place.textContent = JSON.stringify(found);
  document.body.append(place);
}};
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report with long names, many domains and several sections."""
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
    results += [
        made_up(f"strategy {i}", 0, [[i / 40] * 30] * 30, recipe="x" * 60) for i in range(3)
    ]
    return write_report(results_frame(results), tmp_path_factory.mktemp("report"))


def look(page, tmp_path, script, width=1280):
    """What a script returns that sees ``frame`` and ``page``; and the browser's console."""
    text = html.escape(page.read_text(encoding="utf-8"))
    outer = tmp_path / "outer.html"
    outer.write_text(FRAME.format(width=width, page=text, look=script), encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            outer.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found.group(1))), console


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_never_scrolls_sideways(page, tmp_path, width):
    script = """
      var root = page.documentElement, out = [];
      page.querySelectorAll("body *").forEach(function (e) {
        if (e.closest(".scroll, svg")) { return; }
        if (e.getBoundingClientRect().right > root.clientWidth + 0.5) { out.push(e.outerHTML); }
      });
      var wide = page.querySelector(".scroll");
      return {page: root.scrollWidth, window: root.clientWidth, out: out,
              table: wide.scrollWidth, box: wide.clientWidth};
    """
    found, console = look(page, tmp_path, script, width)
    assert found["page"] <= found["window"] <= width
    assert found["out"] == []
    if width == 360:
        assert found["table"] > found["box"]  # the table scrolls in its own box
    assert console == []


def test_a_heading_sorts_and_says_so(page, tmp_path):
    script = """
      var table = page.querySelector("table.sortable"), steps = [];
      function state(column) {
        var heads = Array.from(table.tHead.rows[0].cells);
        return {
          names: Array.from(table.tBodies[0].rows, function (r) {
            return r.querySelector(".name").textContent; }),
          sort: heads.map(function (h) { return h.getAttribute("aria-sort"); })
        };
      }
      steps.push(state());
      var buttons = table.tHead.querySelectorAll("button");
      [1, 1, 0, 4].forEach(function (column) {
        buttons[column].focus();
        if (page.activeElement !== buttons[column]) { throw new Error("no focus"); }
        buttons[column].click();
        steps.push(state());
      });
      return {steps: steps, columns: buttons.length};
    """
    found, console = look(page, tmp_path, script)
    a, b, joint, zero = "a-strategy-with-a-very-long-name-indeed", "<b>x", "joint", "zero"
    assert [step["names"] for step in found["steps"]] == [
        [joint, a, b, zero],  # by accuracy, as it was written
        [zero, b, a, joint],
        [joint, a, b, zero],
        [b, a, joint, zero],  # by name
        [a, b, zero, joint],  # by backward transfer, which the ceiling has not
    ]
    places = [
        [(i, s) for i, s in enumerate(step["sort"]) if s is not None] for step in found["steps"]
    ]
    assert places == [
        [(1, "descending")],
        [(1, "ascending")],
        [(1, "descending")],
        [(0, "ascending")],
        [(4, "descending")],
    ]
    assert console == []


def test_commands_can_be_copied_and_figures_have_the_colour_of_the_text(page, tmp_path):
    script = """
      var copied = [], clipboard = {writeText: function (text) {
        copied.push(text); return Promise.resolve(); }};
      Object.defineProperty(frame.navigator, "clipboard", {value: clipboard});
      page.querySelector("td.copy button").click();
      var text = frame.getComputedStyle(page.body).color;
      var label = page.querySelector("svg text");
      var box = page.querySelector("svg").getBoundingClientRect();
      return {
        buttons: page.querySelectorAll("td.copy button").length,
        rows: page.querySelectorAll("table.commands tbody tr").length,
        copied: copied, command: page.querySelector("table.commands code").textContent,
        text: text, label: frame.getComputedStyle(label).fill,
        ratio: box.width / box.height,
        tagged: page.querySelectorAll("tbody b, th b").length
      };
    """
    found, console = look(page, tmp_path, script)
    assert found["buttons"] == found["rows"] == 7
    assert found["copied"] == [found["command"]]
    assert found["command"] == "covon run r.toml --strategies joint --seeds 0"
    assert found["label"] == found["text"]
    assert 0.7 < found["ratio"] < 1.6
    assert found["tagged"] == 0
    assert console == []
