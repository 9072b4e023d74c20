"""Run tutorials, and store what their cells print and draw, for the site.

    python tutorials/record.py [NAME ...]

Texts go to ``tutorials/outputs/NAME.json``, figures to ``docs/NAME-CELL.png``.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES = ("covon_in_ten_minutes", "compare_your_method", "what_the_posterior_knows")


def cells(text: str) -> list[tuple[bool, str]]:
    """The cells of a script in percent format, and whether they are code."""
    parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)[1:]
    kinds, bodies = parts[::2], parts[1::2]
    return [("markdown" not in kind, body) for kind, body in zip(kinds, bodies, strict=True)]


def code_hash(text: str) -> str:
    """Changes with the code of a script, not with its prose."""
    code = "\n".join(body.strip() for is_code, body in cells(text) if is_code)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def run(text: str, figure_name: str, folder: Path) -> list[dict[str, str]]:
    """What each code cell prints, and the file of its figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for is_code, body in cells(text):
        if not is_code:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(body, figure_name, "exec"), names)
        outputs.append({"text": printed.getvalue().rstrip()})
        if plt.get_fignums():
            outputs[-1]["figure"] = f"{figure_name}-{len(outputs)}.png"
            plt.savefig(folder / outputs[-1]["figure"], dpi=110, bbox_inches="tight")
            plt.close("all")
    return outputs


def main() -> None:
    """Run and store."""
    for name in sys.argv[1:] or NAMES:
        text = (ROOT / "tutorials" / f"{name}.py").read_text(encoding="utf-8")
        outputs = run(text, name.replace("_", "-"), ROOT / "docs")
        file = ROOT / "tutorials/outputs" / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        stored = {"code": code_hash(text), "outputs": outputs}
        file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        print(f"stored in {file}")


if __name__ == "__main__":
    main()
