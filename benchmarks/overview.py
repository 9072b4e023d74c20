"""The README's table of three streams, one of them in two orders, from stored results.

python benchmarks/overview.py
"""

from __future__ import annotations

import pandas as pd
from comparison import RESULTS, ROOT, mean_and_std, replace_part

from covon_avalanche import load_results
from covon_avalanche.report.tables import aligned

NAME = "benchmarks/overview.py"
PAGE = ROOT / "README.md"
STREAMS = {
    "PACS": "pacs/forward.jsonl",
    "PACS, reverse": "pacs/reverse.jsonl",
    "permuted MNIST": "permuted-mnist-hard/results.jsonl",
    "permuted digits": "permuted-digits/results.jsonl",
}
# Strategies of the recipes; where there are two, the first that a stream has.
ROWS = {
    "frozen features: LayUP, mirror images": ("layup-flip",),
    "frozen features: LayUP, two poolings": ("layup-max",),
    "frozen features: RanPAC": ("ranpac",),
    "frozen features: ridge": ("ridge",),
    "**CoVON + RegMean**": ("covon-inputs",),
    "**CoVON**": ("covon-gradsq", "covon"),
    "CoVON-NoM": ("covon-nom",),
    "EMA of the means": ("ema",),
    "EVCL": ("evcl",),
    "LwF (Avalanche's)": ("avalanche-lwf",),
    "EWC (Avalanche's)": ("avalanche-ewc",),
    "Ada-Reg": ("ada-reg",),
    "VCL": ("vcl",),
    "fine-tuning": ("finetune",),
    "joint training (offline)": ("joint",),
}


def overview() -> str:
    """A_T in percent, mean ± standard deviation over seeds, as Markdown."""
    columns = {}
    for stream, file in STREAMS.items():
        runs = load_results(RESULTS / file)
        runs["A_T"] = 100 * runs["average_accuracy"]
        accuracy = runs.groupby("strategy")["A_T"].agg(mean_and_std, digits=1)
        columns[stream] = {
            row: next((accuracy[name] for name in names if name in accuracy), "–")  # noqa: RUF001
            for row, names in ROWS.items()
        }
    return aligned(pd.DataFrame(columns).rename_axis("method").reset_index())


if __name__ == "__main__":
    replace_part(PAGE, NAME, overview())
