"""Results from wherever they lie. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from covon_avalanche.experiment.result import Result, ResultError


def collect_results(paths: Iterable[Path]) -> list[Result]:
    """The results in files and below folders, each once.

    :param paths: folders of runs, ``result.json`` files, or ``.jsonl`` files with a result a line.
    :raises ResultError: naming a path that does not exist, a file that is no result, or that
        nothing was found.
    """
    paths = list(paths)
    found: dict[tuple[str, str, int, str, str], Result] = {}
    for path in paths:
        for result in _in(path):
            name = (result.recipe, result.strategy, result.seed)
            found.setdefault((*name, result.run_hash, result.stream), result)
    if not found:
        raise ResultError(f"there is no finished run in {', '.join(map(str, paths))}")
    return sorted(found.values(), key=lambda r: (r.recipe, r.seed))


def _in(path: Path) -> list[Result]:
    if path.is_dir():
        return [Result.load(file) for file in sorted(path.rglob("result.json"))]
    if path.suffix != ".jsonl":
        return [Result.load(path)]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}") from error
    return [Result.parse(line, f"{path}, line {i}") for i, line in enumerate(lines, 1)]
