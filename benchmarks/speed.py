"""Speed: optimizer steps, training steps, an Avalanche epoch, merges, a whole ``covon run``.

    python benchmarks/speed.py                      # everything, about 20 minutes
    python benchmarks/speed.py --short              # a minute; prints, stores nothing
    python benchmarks/speed.py --before CHECKOUT    # two versions in turns, twice the time
    python benchmarks/speed.py --isa avx2 --only noise step   # as on a processor with AVX2 only
    python benchmarks/speed.py --table              # docs/speed.md from the stored results

``speed_cases.py`` has the cases. Each version of the package has a process of its own; all
cases of a part take turns, in short blocks, so that a slow phase of the machine affects all of
them. A case's figure is its median over the rounds, a ratio the median of the ratios within the
rounds. Results go to ``benchmarks/results/speed/PART.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from speed_cases import ENTRIES, MERGED, OPTIMIZERS, SHAPES, parameters_in

import covon_avalanche

RESULTS = Path(__file__).parent / "results" / "speed"
HERE = Path(covon_avalanche.__file__).parents[1]
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+bmi,+bmi2,+f16c,+lzcnt,+popcnt,+sse4.2",
}
BLOCK = 0.1  # seconds at least of a block of repetitions
Request = dict[str, Any]


def requests(part: str, short: bool) -> list[Request]:
    """The groups of cases of a part; the cases of a group take turns. Of ViT-B, whose optimizers
    do not fit into memory together, a group has AdamW and one other."""
    adamw, *covon = OPTIMIZERS
    all_covon = [name for name in covon if name.startswith("CoVON")]
    compiled = [name for name in all_covon if "compiled" in name]
    if part == "step":
        small = ["MLP 784-100-100-10"] if short else ["MLP 784-100-100-10", "ViT-S/16"]
        groups = [{"model": model, "optimizers": [adamw, *covon]} for model in small]
        if not short:
            pairs = ["AdamW foreach", *all_covon]
            groups += [{"model": "ViT-B/16", "optimizers": [adamw, name]} for name in pairs]
        return groups
    if part == "noise":
        return [{"model": ENTRIES, "optimizers": [adamw, *compiled]}]
    if part == "train":
        models = ["MLP, batch 256"] if short else ["MLP, batch 256", "ViT-S/16, 112 px, batch 8"]
        named = [adamw, "AdamW foreach", *all_covon]
        return [{"model": model, "optimizers": named} for model in models]
    if part == "epoch":
        return [{"examples": 6_000 if short else 60_000}]
    if part == "merge":
        models = [f"{name}, {dtype}" for name in MERGED for dtype in ("bfloat16", "float32")]
        return [{"model": model, "examples": 64 if short else 384} for model in models]
    return [{"arguments": ["--seeds", "0", *(["--epochs", "1"] if short else [])]}]


PARTS = ("step", "noise", "train", "epoch", "merge", "run")
SHORT = ("step", "train", "epoch")


class Worker:
    """A process with one version of the package."""

    def __init__(self, checkout: Path, environment: dict[str, str]) -> None:
        """
        :param checkout: the folder that has ``covon_avalanche``.
        """
        environment = {**os.environ, **environment, "PYTHONPATH": str(checkout.resolve())}
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("speed_cases.py"))]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._answer()
        if not Path(self.about["package"]).is_relative_to(checkout.resolve()):
            raise RuntimeError(f"{checkout} has no package, {self.about['package']} was imported")

    def ask(self, **request: Any) -> Any:
        """Send a request to ``speed_cases.py`` and wait for the answer."""
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"speed_cases.py ended with status {self._process.wait()}")
        return json.loads(line)


def measure_group(
    workers: dict[str, Worker], part: str, threads: int, group: Request, seconds: float
) -> list[dict[str, Any]]:
    """Time the cases of a group in turns.

    :param workers: ``after`` and, if there are two versions, ``before``.
    :param seconds: about how long a case is timed, on average.
    :return: a row per case: ``seconds`` and ``ratio`` (to the first case); with two versions
        ``before_seconds``, ``before_ratio``, and ``change``, which is after / before.
    """
    built = {
        code: worker.ask(part=part, threads=threads, **group) for code, worker in workers.items()
    }
    names = [name for name in built["after"] if all(name in known for known in built.values())]
    jobs = [(name, code) for name in names for code in workers]
    repeats, once = dict.fromkeys(names, 1), {}
    for name, code in jobs if part != "run" else []:
        workers[code].ask(case=name, repeats=1)  # compiles
        once[name, code] = workers[code].ask(case=name, repeats=1)
        repeats[name] = max(repeats[name], round(BLOCK / once[name, code]))
    round_seconds = sum(repeats[name] * value for (name, _), value in once.items()) or math.inf
    timed = []
    for number in range(min(31, max(3, round(seconds * len(jobs) / round_seconds)))):
        for name, code in jobs if number % 2 else reversed(jobs):
            value = workers[code].ask(case=name, repeats=repeats[name])
            timed.append({"round": number, "case": name, "code": code, "seconds": value})
    rounds = pd.DataFrame(timed).pivot(index="round", columns=["code", "case"], values="seconds")
    after, baseline = rounds["after"], names[0]
    found = pd.DataFrame({"seconds": after.median()})
    found["ratio"] = after.div(after[baseline], axis=0).median()
    if "before" in workers:
        before = rounds["before"]
        found["before_seconds"] = before.median()
        found["before_ratio"] = before.div(before[baseline], axis=0).median()
        changes = after / before
        found["change"] = changes.median()
        found["change_25"], found["change_75"] = changes.quantile(0.25), changes.quantile(0.75)
    about: dict[str, Any] = {"model": group.get("model", ""), "threads": threads}
    if about["model"] in SHAPES:
        about["parameters"] = parameters_in(about["model"])
    about["rounds"] = len(rounds)
    table = found.loc[names].reset_index(names="case").round(6)
    return [{**about, **row} for row in table.to_dict("records")]


def measure(
    workers: dict[str, Worker], part: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All groups of a part; of a case that several groups have, the first."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for threads in options.threads if part == "step" else options.threads[:1]:
        for group in requests(part, options.short):
            for row in measure_group(workers, part, threads, group, options.seconds):
                key = (row["model"], row["threads"], row["case"])
                if key not in rows:
                    rows[key] = row
                    print(row, flush=True)
    return list(rows.values())


def main() -> None:
    """Measure, store, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="small cases; stores nothing")
    parser.add_argument("--seconds", type=float, help="per case; default 8, with --short 1")
    parser.add_argument("--only", choices=PARTS, nargs="+", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of steps; default 1")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="of an older version")
    parser.add_argument("--isa", choices=["avx2"], help="emulate a processor with AVX2 only")
    parser.add_argument("--table", action="store_true", help="write docs/speed.md, measure nothing")
    options = parser.parse_args()
    options.seconds = options.seconds or (1.0 if options.short else 8.0)
    if not options.table:
        measure_all(options)
    if not options.short:
        from speed_table import write_tables

        write_tables()


def measure_all(options: argparse.Namespace) -> None:
    """Measure the chosen parts, and store each when it is done."""
    load = os.getloadavg()
    checkouts = {"before": options.before, "after": HERE} if options.before else {"after": HERE}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**AVX2, "NUMBA_CACHE_DIR": folder} if options.isa else {}
        workers = {code: Worker(path, environment) for code, path in checkouts.items()}
        for part in options.only or (SHORT if options.short else PARTS):
            start = time.perf_counter()
            rows = measure(workers, part, options)
            print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
            if options.short:
                continue
            from comparison import write_measurement

            write_measurement(
                RESULTS / (f"{part}-{options.isa}.json" if options.isa else f"{part}.json"),
                rows,
                script="benchmarks/speed.py",
                cpu_capability=workers["after"].about["cpu_capability"],
                load_average=load,
                numba=version("numba"),
            )


if __name__ == "__main__":
    main()
