"""Kill a grid of runs again and again; check that nothing is lost and no result differs.

    python benchmarks/kills.py             # 50 kills, some minutes; results/kills.json
    python benchmarks/kills.py --short     # 3 kills; stores nothing

``covon run`` and all its processes get SIGKILL at random moments, and the same command is
given again. When a grid is finished, one with other seeds begins. At the end each result is
compared with that of an undisturbed run: all but the times must be equal bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from covon_avalanche.experiment.result import Result

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
    """The text of finished results, by path below the folder."""
    files = sorted(folder.rglob("result.json"))
    return {path.relative_to(folder): path.read_text(encoding="utf-8") for path in files}


def disturb(folder: Path, seed: int, epochs: int, chance: random.Random) -> bool:
    """Start the grid and kill it within four seconds after it has begun to work.

    :return: whether it was finished before.
    """
    before = _times(folder)
    process = subprocess.Popen(
        command(folder, seed, epochs), stdout=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None and _times(folder) == before:
        time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=chance.uniform(0, 4))
    finished = process.poll() is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return finished


def _times(folder: Path) -> dict[Path, int]:
    """When the JSON files below were written; those that vanish meanwhile are left out."""
    found = {}
    for path in folder.rglob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.stat().st_mtime_ns
    return found


def measure(kills: int, epochs: int, folder: Path, chance: random.Random) -> dict[str, int]:
    """Kill, finish, compare."""
    found = {"kills": 0, "results": 0, "interrupted runs": 0, "lost": 0, "differing": 0}
    seed = 0
    while found["kills"] < kills:
        grid, undisturbed = folder / f"grid-{seed}", folder / f"undisturbed-{seed}"
        finished = False
        while found["kills"] < kills and not finished:
            before = results_below(grid)
            finished = disturb(grid, seed, epochs, chance)
            found["kills"] += not finished
            after = results_below(grid)
            found["lost"] += sum(after.get(path) != text for path, text in before.items())
            print(f"{found['kills']} kills, {len(after)} results of this grid", flush=True)
        for path in (grid, undisturbed):
            subprocess.run(command(path, seed, epochs), check=True, stdout=subprocess.DEVNULL)
        ours, theirs = results_below(grid), results_below(undisturbed)
        found["lost"] += len(theirs.keys() - ours.keys())
        for path in theirs.keys() & ours.keys():
            mine = Result.model_validate_json(ours[path])
            found["results"] += 1
            found["interrupted runs"] += mine.resumed > 0
            other = Result.model_validate_json(theirs[path])
            found["differing"] += mine.outcome() != other.outcome()
        seed += 2
    return found


def main() -> None:
    """Measure, and fail if anything was lost or differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args().short
    kills, epochs = (3, 4) if short else (50, 30)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(kills, epochs, Path(folder), random.Random(0))
    print(found)
    if not short:
        from comparison import RESULTS, write_measurement

        about = {"script": "benchmarks/kills.py", "epochs": epochs, "strategies": STRATEGIES}
        write_measurement(RESULTS / "kills.json", found, **about)
    if found["lost"] or found["differing"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
