"""Is the CPU noise good? Its bits through dieharder, its normals against the normal distribution.

    python benchmarks/noise_battery.py     # 10 minutes; dieharder from the system's packages

Three streams of bits, because steps draw along all three: consecutive words of a parameter, the
same words of consecutive parameters, and the same words under the keys of consecutive draws. The
shorter statistics that every change must pass are in ``tests/optim/test_noise.py``. Results go to
``benchmarks/results/noise.json``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from typing import Any

import numpy as np
import torch
from comparison import RESULTS, write_measurement
from numba import njit
from scipy import stats

from covon_avalanche.optim.noise import GROUP, _hash32, _mix64, _pair, fill_group
from covon_avalanche.optim.samples import fill_normal_, noise_key

# birthdays, ranks, bitstream, counts of ones, parking lot, spheres, runs, STS, RGB distances,
# lagged sums, KS, byte distribution, DCT, monobit
TESTS = (0, 2, 3, 8, 9, 10, 11, 12, 15, 100, 101, 102, 201, 203, 204, 205, 206, 209)
_WORDS = GROUP // 2  # of a group: a word makes two normals
_GROUPS = 256  # that are written at a time
_FEW = 4  # words of a group, of those streams that go along parameters or draws


u32, u64 = np.uint32, np.uint64


@njit
def _bits(out, keys, numbers, groups):
    """The first words of groups, a row for each."""
    for row in range(len(out)):
        number, group = u64(numbers[row]), u64(groups[row])
        state = _mix64(u64(keys[row] + _mix64(u64((number << u64(32)) + group + u64(1)))))
        word, increment = u32(state), u32(u32(state >> u64(32)) | u32(1))
        for j in range(out.shape[1]):
            out[row, j] = _hash32(word)
            word = u32(word + increment)


@njit
def _bits_differ(key, number, group):
    """Whether the words are not those that the package makes its normals from."""
    noise, words = np.empty(GROUP, np.float32), np.empty((1, _WORDS), np.uint32)
    fill_group(noise, key, number, group)
    _bits(words, np.array([key]), np.array([number]), np.array([group]))
    worst = 0.0
    for j in range(_WORDS):
        first, second = _pair(words[0, j])
        worst = max(worst, abs(first - noise[j]), abs(second - noise[j + _WORDS]))
    return worst > 1e-5


def chunk(stream: str, seed: int, start: int) -> np.ndarray:
    """The words of a stream from some group, parameter or draw on."""
    index = np.arange(start, start + _GROUPS)
    same = np.zeros(_GROUPS, np.int64)
    if stream == "draws":
        keys = np.array([noise_key(seed, int(draw)) for draw in index], np.uint64)
    else:
        keys = np.full(_GROUPS, noise_key(seed, 0), np.uint64)
    out = np.empty((_GROUPS, _WORDS if stream == "words" else _FEW), np.uint32)
    numbers, groups = {"words": (same, index), "parameters": (index, same), "draws": (same, same)}[
        stream
    ]
    _bits(out, keys, numbers, groups)
    return out


def dieharder(stream: str, test: int) -> list[tuple[str, float, str]]:
    """Names, p-values and verdicts of one test on a fresh start of a stream."""
    command = ["dieharder", "-g", "200", "-d", str(test), "-D", "test_name", "-D", "pvalues"]
    command += ["-D", "assessment", "-c", "|"]
    if test == 201:
        command += ["-n", "3"]  # dimensions, which have no default
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        start = 0
        try:
            while process.poll() is None:
                process.stdin.write(chunk(stream, test, start).tobytes())
                start += _GROUPS
        except BrokenPipeError:
            pass
        lines = process.stdout.read().decode().splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line]
    return [(r[0], float(r[1]), r[2]) for r in rows if len(r) >= 3 and r[2].isupper()]


def normals(n: int = 10**8) -> dict[str, float]:
    """Moments in standard errors, correlations, tails, and distances to the distribution."""
    z = fill_normal_(torch.empty(n), noise_key(3, 0), 1).numpy().astype(np.float64)
    result: dict[str, float] = {"entries": n}
    for power in (1, 2, 3, 4, 6, 8):
        moment = float(stats.norm.moment(power))
        error = ((stats.norm.moment(2 * power) - moment**2) / n) ** 0.5
        result[f"moment {power}, standard errors"] = float(((z**power).mean() - moment) / error)
    for lag in (1, 2, 16, GROUP // 2, GROUP):
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
    """Measure what can be measured here."""
    if _bits_differ(u64(noise_key(3, 0)), 1, 2):
        raise RuntimeError("noise.py has other words now: adapt _bits")
    found: dict[str, Any] = {"normals": normals()}
    print(json.dumps(found, indent=1), flush=True)
    for stream in ("words", "parameters", "draws") if shutil.which("dieharder") else ():
        rows = [row for test in TESTS for row in dieharder(stream, test)]
        verdicts = Counter(verdict for *_, verdict in rows)
        found[stream] = {"verdicts": verdicts, "p-values": [row[:2] for row in rows]}
        print(stream, verdicts, flush=True)
    write_measurement(RESULTS / "noise.json", found, script="benchmarks/noise_battery.py")


if __name__ == "__main__":
    main()
