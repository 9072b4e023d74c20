"""The tables of ``docs/speed.md``, from the stored results of ``speed.py``."""

from __future__ import annotations

import json
from collections.abc import Callable

import pandas as pd
from comparison import RESULTS, ROOT, provenance, replace_part

from covon_avalanche.report.tables import aligned

FOLDER = RESULTS / "speed"
PAGE = ROOT / "docs/speed.md"


def in_milliseconds(seconds: float) -> str:
    """Three digits."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def ratios(rows: pd.DataFrame) -> str:
    """One line per case, one column per model; ratios to the first case, with its time."""
    first = rows["case"].iloc[0]
    rows = rows.assign(column=rows["model"], text=rows["ratio"].map("{:.2f}".format))
    if "parameters" in rows:
        size = (rows["parameters"] / 1e6).map(" ({:.3g} M)".format)
        rows["column"] = rows["model"] + size
    if rows["threads"].nunique() > 1:
        rows["column"] += ", threads: " + rows["threads"].astype(str)
    base = rows["case"] == first
    rows.loc[base, "text"] = "1 (" + rows.loc[base, "seconds"].map(in_milliseconds) + ")"
    rows["column"] = rows["column"].replace("", "ratio")
    columns, cases = rows["column"].unique(), rows["case"].unique()
    table = rows.pivot(index="case", columns="column", values="text").loc[cases, columns]
    return aligned(table.fillna("-").reset_index(names=""))


def changes(rows: pd.DataFrame) -> str:
    """The two versions side by side."""
    bounds = zip(rows["change_25"], rows["change_75"], strict=True)
    table = pd.DataFrame(
        {
            "": rows["model"],
            "case": rows["case"],
            "threads": rows["threads"].astype(str),
            "before": rows["before_seconds"].map(in_milliseconds),
            "after": rows["seconds"].map(in_milliseconds),
            "after / before": rows["change"].map("{:.3f}".format),
            "quartiles": [f"{low:.3f} to {high:.3f}" for low, high in bounds],
        }
    )
    return aligned(table, left=2)


TABLES: dict[str, Callable[[pd.DataFrame], str]] = {
    **dict.fromkeys(("step", "noise", "train", "epoch", "merge", "run"), ratios),
    **dict.fromkeys(("step-avx2", "noise-avx2"), ratios),
}


def write_tables() -> None:
    """Write the tables whose results are stored; those before/after of all parts are one."""
    compared, last = [], ""
    for name, table in TABLES.items():
        file = FOLDER / f"{name}.json"
        if not file.exists():
            continue
        stored = json.loads(file.read_text(encoding="utf-8"))
        rows = pd.DataFrame(stored["rows"])
        about = provenance(stored, stored.get("cpu_capability", ""))
        replace_part(PAGE, f"benchmarks/speed.py, {name}", f"{table(rows)}\n\n{about}")
        if "change" in rows:
            model = rows["model"].where(rows["model"] != "", name)
            compared.append(rows.assign(model=name + ": " + model))
            last = about
    if compared:
        text = f"{changes(pd.concat(compared))}\n\n{last}"
        replace_part(PAGE, "benchmarks/speed.py, before and after", text)
