"""A report that several test modules read."""

from pathlib import Path

import pytest
from made_up_results import made_up_comparison

from covon_avalanche.report import results_frame, write_report


@pytest.fixture(scope="session")
def report(tmp_path_factory) -> Path:
    """The folder of the report of ``made_up_comparison``."""
    runs = results_frame(made_up_comparison())
    return write_report(runs, tmp_path_factory.mktemp("report")).parent
