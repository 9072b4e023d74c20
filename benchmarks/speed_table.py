"""Turn the stored results of ``speed.py`` and ``implementations.py`` into docs/speed.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def table(head: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def grid(rows: list[Row], columns: list[str], ratio_to: str) -> str:
    """One line a case, one column a model; ratios to a case, which shows its seconds."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    seconds = {(row["case"], row["model"]): row["seconds"] for row in rows}

    def cell(case: str, model: str) -> str:
        if (case, model) not in seconds:
            return "-"
        value = seconds[case, model]
        if case == ratio_to:
            return f"1 ({1000 * value:.3g} ms)"
        return f"{value / seconds[ratio_to, model]:.2f}"

    return table(["", *columns], ([case, *(cell(case, m) for m in columns)] for case in cases))


def steps(rows: list[Row]) -> str:
    title = (
        "## A step of the optimizer\n\nSample, restore, update, without forward and backward pass; "
        "ratios to fused AdamW in the same run. CoVON has the reparametrised estimate of the "
        "curvature, where nothing else is said."
    )
    parts = [title]
    for threads in sorted({row["threads"] for row in rows}):
        some = [row for row in rows if row["threads"] == threads]
        models = list(dict.fromkeys(row["model"] for row in some))
        sizes = {row["model"]: row["parameters"] for row in some}
        text = grid(some, models, "AdamW fused")
        named = [f"{m} ({sizes[m] / 1e6:.3g} M)" for m in models]
        for model, name in zip(models, named, strict=True):
            text = text.replace(f"| {model} ", f"| {name} ", 1)
        parts.append(f"{threads} thread{'s' if threads > 1 else ''}:\n\n{text}")
    return "\n\n".join(parts)


def accuracy(rows: list[Row]) -> str:
    def line(row: Row) -> list[str]:
        values = [100 * value for value in row["a_t"]]
        return [row["case"], f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"]

    return (
        "## Accuracy does not depend on the implementation\n\n"
        f"Permuted digits, constant learning rate, {len(rows[0]['a_t'])} seeds "
        "([script](../benchmarks/implementations.py)).\n\n" + table(["", "A_T %"], map(line, rows))
    )


def data(rows: list[Row]) -> str:
    bare = rows[0]["seconds"]
    cells = ([r["case"], f"{r['seconds']:.2f}", f"{r['seconds'] / bare:.2f}"] for r in rows)
    return (
        f"## An epoch of {rows[0]['examples']:,} pictures of MNIST's size\n\n"
        "MLP 784-100-100-10, batch 256, AdamW (CoVON in the last line), one thread.\n\n"
        + table(["", "seconds", "ratio"], cells)
    )


def fisher(rows: list[Row]) -> str:
    text = grid(rows, list(dict.fromkeys(r["model"] for r in rows)), "training epoch")
    return "## Fisher information, against an epoch of training on the same batches\n\n" + text


def growth(rows: list[Row]) -> str:
    def line(row: Row) -> list[str]:
        batch, end, memory = row["batch_seconds"], row["end_seconds"], row["memory"]
        return [
            row["case"],
            *(f"{1000 * batch[t]:.2f}" for t in (0, 1, 4, 9)),
            *(f"{1000 * end[t]:.0f}" for t in (1, 9)),
            *(f"{memory[t]:.1f}" for t in (1, 9)),
        ]

    head = ["", *(f"batch, task {t}" for t in (1, 2, 5, 10))]
    head += ["end of task 2", "of task 10", "memory, task 2", "task 10"]
    return (
        "## What grows with the number of tasks\n\n"
        "MLP 784-100-100-10, ten tasks of 4,000 examples; milliseconds of a batch of 256 (all "
        "of it: data, forward, backward, update), milliseconds after the last epoch of a task, "
        "and tensors kept between steps in units of the weights.\n\n" + table(head, map(line, rows))
    )


def vit(rows: list[Row]) -> str:
    first = rows[0]["batch_seconds"]
    cells = (
        [
            row["case"],
            *(f"{s:.2f} ({s / f:.3f})" for s, f in zip(row["batch_seconds"], first, strict=True)),
            *(f"{row['end_seconds'][t]:.2f}" for t in (0, 1)),
            *(f"{row['memory'][t]:.1f}" for t in (0, 1)),
        ]
        for row in rows
    )
    head = ["", "batch, task 1", "batch, task 2", "end of task 1", "end of task 2"]
    head += ["memory, task 1", "memory, task 2"]
    return (
        "## A vision transformer\n\n"
        f"ViT-B/16 at 224 pixels, batch {rows[0]['batch']}, four batches a task, two threads, CPU. "
        "Seconds of a batch (and ratio to fine-tuning), seconds after the last epoch of a task, "
        "and tensors kept between steps in units of the weights.\n\n" + table(head, cells)
    )


def write_table(results: Path, target: Path) -> None:
    """Write the page from what is stored."""
    title = "# Speed and memory\n\nWritten by `python benchmarks/speed.py` from "
    parts = [title + "[its results](../benchmarks/results/speed); figures are medians."]
    for name, section in (
        ("step", steps),
        ("accuracy", accuracy),
        ("data", data),
        ("fisher", fisher),
        ("growth", growth),
        ("vit", vit),
    ):
        file = results / f"{name}.json"
        if not file.is_file():
            continue
        stored = json.loads(file.read_text(encoding="utf-8"))
        where = stored["machine"]
        versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items())
        parts.append(section(stored["rows"]) + f"\n\n<sub>{where['processor']}; {versions}</sub>")
    target.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
