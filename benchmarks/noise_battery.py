"""Is the compiled kernels' noise good? Bits through dieharder, normals against the normal.

    python benchmarks/noise_battery.py     # a few minutes; dieharder from the system's packages

Three streams of bits, because a step draws along all three: consecutive places of a tensor,
the same places of consecutive tensors, and the same places under the keys of consecutive
steps. The shorter statistics that every change must pass are tests/optim/test_noise.py.
Results: ``benchmarks/results/noise.json``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from covon_avalanche.optim.kernels.threefry import GROUP, fill_group, threefry2x32
from numba import njit
from scipy import stats

from covon_avalanche.optim.noise import NoiseSource

TARGET = Path(__file__).parent / "results" / "noise.json"
# birthdays, ranks, bitstream, counts of ones, parking lot, spheres, runs, STS, RGB distances,
# lagged sums, KS, byte distribution, DCT, monobit
TESTS = (0, 2, 3, 8, 9, 10, 11, 12, 15, 100, 101, 102, 201, 203, 204, 205, 206, 209)
_CHUNK = 2**16


@njit
def _by_place(out, start, keys):
    for i in range(len(out) // 2):
        at = start + i
        words = threefry2x32(np.uint32(7), np.uint32(9), np.uint32(at), np.uint32(at >> 32))
        out[2 * i], out[2 * i + 1] = words


@njit
def _by_tensor(out, start, keys):
    for i in range(len(out) // 2):
        at = start + i
        words = threefry2x32(np.uint32(7), np.uint32(9), np.uint32(at % 64), np.uint32(at // 64))
        out[2 * i], out[2 * i + 1] = words


@njit
def _by_step(out, start, keys):
    for i in range(len(out) // 2):
        key = keys[i // 64]
        low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
        words = threefry2x32(low, high, np.uint32(i % 64), np.uint32(0))
        out[2 * i], out[2 * i + 1] = words


STREAMS = {"places": _by_place, "tensors": _by_tensor, "steps": _by_step}


def dieharder(stream: str, test: int) -> list[tuple[str, float, str]]:
    """Names, p-values and verdicts of one test on a fresh start of a stream."""
    command = ["dieharder", "-g", "200", "-d", str(test), "-D", "test_name", "-D", "pvalues"]
    command += ["-D", "assessment", "-c", "|"]
    if test == 201:
        command += ["-n", "3"]  # in three dimensions; its default of none means nothing
    source = NoiseSource(torch.Generator().manual_seed(test))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        words, start = np.empty(_CHUNK, np.uint32), 0
        keys = np.zeros(_CHUNK // 128, np.int64)
        try:
            while process.poll() is None:
                if stream == "steps":
                    keys[:] = [source.key() for _ in keys]
                STREAMS[stream](words, start, keys)
                start += _CHUNK // 2
                process.stdin.write(words.tobytes())
        except BrokenPipeError:
            pass
        lines = process.stdout.read().decode().splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line]
    return [(r[0], float(r[1]), r[2]) for r in rows if len(r) >= 3 and r[2].isupper()]


@njit
def _normals(key, groups):
    out = np.empty((groups, GROUP), np.float32)
    for group in range(groups):
        fill_group(out[group], np.uint32(key), np.uint32(1), np.uint32(0), group)
    return out


def normals(n: int = 10**8) -> dict[str, float]:
    """Distance to the normal distribution, moments in standard errors, and the tails."""
    z = _normals(3, n // GROUP).ravel().astype(np.float64)
    n = len(z)
    result: dict[str, float] = {"entries": n}
    for power in (1, 2, 3, 4, 6, 8):
        moment = float(stats.norm.moment(power))
        error = ((stats.norm.moment(2 * power) - moment**2) / n) ** 0.5
        result[f"moment {power}, standard errors"] = float(((z**power).mean() - moment) / error)
    for lag in (1, 2, 16, GROUP // 4, GROUP):
        correlation = (z[:-lag] * z[lag:]).mean()
        result[f"correlation at {lag}, standard errors"] = float(correlation * n**0.5)
    for limit in (4.0, 4.5, 5.0, 5.5):
        expected = n * stats.norm.sf(limit)
        for name, sign in (("above", 1), ("below", -1)):
            excess = ((sign * z > limit).sum() - expected) / expected**0.5
            result[f"{name} {limit}, standard errors"] = float(excess)
    ranks = np.bincount((stats.norm.cdf(z) * 10_000).astype(np.int64), minlength=10_000)
    result["p-value of 10,000 equal cells"] = float(stats.chisquare(ranks).pvalue)
    result["p-value of Kolmogorov-Smirnov"] = float(stats.kstest(z[: 10**7], "norm").pvalue)
    return result


def main() -> None:
    found: dict[str, object] = {"normals": normals()}
    print(json.dumps(found, indent=1), flush=True)
    if shutil.which("dieharder"):
        for stream in STREAMS:
            rows = [row for test in TESTS for row in dieharder(stream, test)]
            verdicts = Counter(verdict for *_, verdict in rows)
            found[stream] = {"verdicts": verdicts, "p-values": [row[:2] for row in rows]}
            print(stream, verdicts, flush=True)
            TARGET.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    TARGET.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
