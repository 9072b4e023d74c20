"""Kill a grid of runs again and again; check that nothing is lost and no result differs.

    python tests/kills.py             # 50 kills, some minutes; benchmarks/results/kills.json
    python tests/kills.py --short     # 3 kills; stores nothing

At random moments, from the first imports on, ``covon run`` gets a signal, alone or with all its
processes, once or twice, and the same command is given again. When a grid is finished, one with
other seeds begins. At the end each result is compared with that of an undisturbed run: all but the
times must be equal bit by bit. After each signal all processes must end, without a traceback after
Ctrl-C, and leave no semaphores.
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
from collections.abc import Callable
from pathlib import Path

from small_recipes import reproducible

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.machine import machine, versions
from covon_avalanche.experiment.result import Result

STRATEGIES = ("ewc-star", "vcl", "covon")
Kill = tuple[Callable[[int, int], None], signal.Signals, int]
KILLS: list[Kill] = [
    (os.killpg, signal.SIGKILL, 1),
    (os.killpg, signal.SIGINT, 2),
    (os.kill, signal.SIGKILL, 1),
    (os.killpg, signal.SIGINT, 1),
    (os.kill, signal.SIGINT, 1),
    (os.killpg, signal.SIGTERM, 1),
]
"""To the process or to its group, which signal, and how often; used in turn."""
WRONG = ("lost", "differing", "hung", "tracebacks", "semaphores")


def command(folder: Path, seed: int, epochs: int) -> list[str]:
    """A grid of three strategies with two seeds; with few epochs one seed, on two domains, in one
    process."""
    short = ("--set", "stream.n_experiences=2", "--set", "train_mb_size=256", "--jobs", "1")
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


def disturb(folder: Path, seed: int, epochs: int, chance: random.Random, kill: Kill) -> list[str]:
    """Start the grid, and send a signal in its first second, or within four seconds after it has
    begun to work.

    :return: what went wrong, or ``["finished"]`` if the grid ended before the signal.
    """
    before, semaphores = _times(folder), _semaphores()
    process = subprocess.Popen(
        command(folder, seed, epochs),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    longest = 1
    if chance.random() < 0.8:
        longest = 4
        while process.poll() is None and _times(folder) == before:
            time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=chance.uniform(0, longest))
        process.communicate()
        return ["finished"]
    send, number, times = kill
    for _ in range(times):
        with contextlib.suppress(ProcessLookupError):
            send(process.pid, number)
        time.sleep(chance.uniform(0, 0.5))
    try:
        _, errors = process.communicate(timeout=60)  # until the last that may write is gone
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return ["hung"]
    wrong = ["tracebacks"] if number == signal.SIGINT and "Traceback" in errors else []
    left = _semaphores() - semaphores
    return wrong + ["semaphores"] * any(f"-{process.pid}-" in name for name in left)


def _semaphores() -> set[str]:
    """Their names contain the process; on systems without ``/dev/shm`` there are none to see."""
    return {path.name for path in Path("/dev/shm").glob("sem.*")}


def _times(folder: Path) -> dict[Path, int]:
    """When the JSON files below were written; those that vanish meanwhile are left out."""
    found = {}
    for path in folder.rglob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.stat().st_mtime_ns
    return found


def measure(kills: int, epochs: int, folder: Path, chance: random.Random) -> dict[str, int]:
    """Kill, finish, compare."""
    found = {"kills": 0, "results": 0, "interrupted runs": 0} | dict.fromkeys(WRONG, 0)
    seed = 0
    while found["kills"] < kills:
        grid, undisturbed = folder / f"grid-{seed}", folder / f"undisturbed-{seed}"
        finished = False
        while found["kills"] < kills and not finished:
            before = results_below(grid)
            wrong = disturb(grid, seed, epochs, chance, KILLS[found["kills"] % len(KILLS)])
            finished = wrong == ["finished"]
            found["kills"] += not finished
            for what in () if finished else wrong:
                found[what] += 1
            after = results_below(grid)
            found["lost"] += sum(after.get(path) != text for path, text in before.items())
            print(f"{found['kills']} kills, {len(after)} results of this grid", flush=True)
        for path in (grid, undisturbed):
            subprocess.run(command(path, seed, epochs), check=True, stdout=subprocess.DEVNULL)
        ours, theirs = results_below(grid), results_below(undisturbed)
        found["lost"] += len(theirs.keys() - ours.keys())
        for path in theirs.keys() & ours.keys():
            mine = Result.parse(ours[path], str(path))
            found["results"] += 1
            found["interrupted runs"] += mine.resumed > 0
            other = Result.parse(theirs[path], str(path))
            found["differing"] += reproducible(mine) != reproducible(other)
        seed += 2
    return found


def main() -> None:
    """Measure, and fail if anything was lost or differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args().short
    kills, epochs = (3, 4) if short else (50, 30)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    with tempfile.TemporaryDirectory() as folder:
        found = measure(kills, epochs, Path(folder), random.Random(0))
    print(found)
    if not short:
        about = {"script": "tests/kills.py", "epochs": epochs, "strategies": STRATEGIES}
        about |= {"versions": versions(), "machine": machine(), "rows": found}
        file = Path(__file__).parents[1] / "benchmarks/results/kills.json"
        write_atomically(file, json.dumps(about, indent=1) + "\n")
    if any(found[what] for what in WRONG):
        sys.exit(1)


if __name__ == "__main__":
    main()
