"""The whole command, killed and given again."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "kills.py"


def test_a_killed_grid_loses_nothing_and_ends_with_the_same_results():
    """The short form of the script, which also exits with 1 when anything differs."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "--short"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'kills': 3" in done.stdout
    assert "'lost': 0, 'differing': 0" in done.stdout
