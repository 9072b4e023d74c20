"""Results from wherever they lie. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.experiment.run_folder import decisive


def collect_results(paths: Iterable[Path]) -> list[Result]:
    """The results in files and below folders, each once.

    :param paths: folders of runs, ``result.json`` files, or ``.jsonl`` files with a result a line.
    :raises ResultError: naming a path that does not exist, a file that is no result, two of the
        same run that differ, or that nothing was found.
    """
    paths = list(paths)
    found: dict[tuple[str, str, int, str, str], tuple[str, Result]] = {}
    for path in paths:
        for where, result in _in(path):
            name = (result.recipe, result.strategy, result.seed)
            settings = result.run_hash or json.dumps(decisive(result.settings), sort_keys=True)
            first, known = found.setdefault((*name, settings, result.stream), (where, result))
            if _numbers(known) != _numbers(result):
                raise ResultError(
                    f"{first} and {where} are of the same run and differ: {result.strategy} with "
                    f"seed {result.seed} in recipe {result.recipe!r}; name one of them only"
                )
    if not found:
        raise ResultError(f"there is no finished run in {', '.join(map(str, paths))}")
    return sorted((result for _, result in found.values()), key=lambda r: (r.recipe, r.seed))


def _numbers(result: Result) -> str:
    """What was measured, without what a file may lack or name otherwise; nan equals nan here."""
    left_out = {"epochs", "settings", "schema_version"}
    return json.dumps({k: v for k, v in result.outcome().items() if k not in left_out})


def _in(path: Path) -> Iterator[tuple[str, Result]]:
    """Each with the name of where it is from."""
    if path.is_dir():
        yield from ((str(file), Result.load(file)) for file in sorted(path.rglob("result.json")))
        return
    if path.suffix != ".jsonl":
        yield str(path), Result.load(path)
        return
    try:
        with path.open(encoding="utf-8") as file:
            lines = list(file)  # splitlines() would cut at other characters, too
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ResultError(f"{path} has no results: it is not text") from error
    for i, line in enumerate(lines, 1):
        where = f"{path}, line {i}"
        yield where, Result.parse(line, where)
