"""Kill a grid of runs again and again, and see that nothing is lost and nothing differs.

    python benchmarks/kills.py             50 kills, some minutes; writes results/kills.json
    python benchmarks/kills.py --short     3 kills, writes nothing

``covon run`` gets SIGKILL with all its processes at random moments, and the same command is
given again. When a grid is finished, one with other seeds begins. At the end each result is
compared with that of a run that nobody disturbed: bit by bit, all but the times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.machine import machine, versions
from covon_avalanche.report.results import read_results

STORED = Path(__file__).parent / "results" / "kills.json"
STRATEGIES = ("ewc-star", "vcl", "covon")


def command(folder: Path, seed: int, epochs: int) -> list[str]:
    """A grid of three strategies with two seeds; with few epochs one seed, on two domains."""
    short = ("--set", "stream.n_experiences=2", "--set", "train_mb_size=256")
    is_short = epochs < 10
    return [
        *(sys.executable, "-W", "ignore", "-m", "covon_avalanche", "run", "permuted-digits"),
        *("--strategies", ",".join(STRATEGIES), "--seeds", f"{seed}-{seed + (not is_short)}"),
        *("--epochs", str(epochs), "--checkpoint-minutes", "0", "--out", str(folder)),
        *(short if is_short else ()),
    ]


def results_below(folder: Path) -> dict[Path, str]:
    """Finished results as they stand on disk."""
    return {path: path.read_text(encoding="utf-8") for path in folder.rglob("result.json")}


def disturb(folder: Path, seed: int, epochs: int, chance: random.Random) -> bool:
    """Start the grid and kill it some moments after it has begun to work.

    :return: whether it was finished before.
    """
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    process = subprocess.Popen(
        command(folder, seed, epochs), stdout=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None:
        now = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json") if path.exists()}
        if now != before:
            break
        time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=chance.uniform(0, 4))
    finished = process.poll() is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return finished


def measure(kills: int, epochs: int, folder: Path, chance: random.Random) -> dict[str, int]:
    """Kill, finish, compare."""
    found = {"kills": 0, "results": 0, "interrupted runs": 0, "lost": 0, "differing": 0}
    seed = 0
    while found["kills"] < kills:
        grid = folder / f"grid-{seed}"
        finished = False
        while found["kills"] < kills and not finished:
            before = results_below(grid)
            finished = disturb(grid, seed, epochs, chance)
            found["kills"] += not finished
            after = results_below(grid)
            found["lost"] += sum(after.get(path) != text for path, text in before.items())
            print(f"{found['kills']} kills, {len(after)} results of this grid", flush=True)
        subprocess.run(command(grid, seed, epochs), check=True, stdout=subprocess.DEVNULL)
        whole = folder / f"undisturbed-{seed}"
        subprocess.run(command(whole, seed, epochs), check=True, stdout=subprocess.DEVNULL)
        for mine, theirs in zip(read_results([grid]), read_results([whole]), strict=True):
            found["results"] += 1
            found["interrupted runs"] += mine.continued > 0
            found["differing"] += mine.outcome() != theirs.outcome()
        seed += 2
    return found


def main() -> None:
    """Measure, and fail if anything was lost or differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kills, epochs = (3, 4) if arguments.short else (50, 30)
        found = measure(kills, epochs, Path(folder), random.Random(0))
    print(found)
    if not arguments.short:
        about = {"script": "benchmarks/kills.py", "epochs": epochs, "strategies": STRATEGIES}
        about |= {"found": found, "versions": versions(), "machine": machine()}
        write_atomically(STORED, json.dumps(about, indent=1) + "\n")
    if found["lost"] or found["differing"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
