"""Commands, in the process of a test or as a terminal starts them; scripts in two processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from click.testing import Result
from typer.testing import CliRunner

from covon_avalanche.cli import app
from covon_avalanche.experiment import grid
from covon_avalanche.experiment.recipe import shipped_recipes

COMMANDS = typer.main.get_command(app)
PLACEHOLDERS = {"RECIPE", "mine.toml", "my-pictures.toml", "strangers.toml"}
PLACEHOLDERS |= {"searches/mine/best.toml"}


def covon(*arguments: object, status: int = 0, **options: Any) -> Result:
    """Run ``covon``, without a process of its own; it exits with this status."""
    done = CliRunner().invoke(app, [*map(str, arguments)], **options)
    assert done.exit_code == status, (done.exit_code, done.output, done.exception)
    return done


def refused(*arguments: object) -> str:
    """The sentence of a command that is refused."""
    done = covon(*arguments, status=2)
    assert "Traceback" not in done.output
    sentence = done.stderr.strip()
    if "Usage:" not in sentence:  # typer's own errors come in a box
        assert len(sentence.splitlines()) == 1, sentence
        assert sentence.startswith("covon: ")
    return sentence


def covon_in_a_process(
    environment: dict[str, str], *commands: tuple[str, Sequence[object]]
) -> list[bytes]:
    """What commands print in one process with these variables, each with its standard encoding."""
    words = [(encoding, ["covon", *map(str, command)]) for encoding, command in commands]
    code = f"""
import sys, warnings
warnings.simplefilter("ignore")
from covon_avalanche.__main__ import main
for encoding, sys.argv in {words!a}:
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\\0")
    sys.stdout.flush()
"""
    options = {"env": {**os.environ, **environment}, "stdout": subprocess.PIPE, "check": True}
    done = subprocess.run([sys.executable, "-c", code], **options)
    return done.stdout.split(b"\0")[:-1]


def check_command(words: list[str], whole: bool = True) -> None:
    """Fail if the command, an option or a shipped recipe does not exist, or an option is wrong."""
    command = COMMANDS
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    options = {"--help", *(option for parameter in command.params for option in parameter.opts)}
    unknown = [word for word in words if word.startswith("-") and word not in options]
    assert not unknown, f"covon {command.name} has no {unknown[0]}"
    if whole and not hasattr(command, "commands"):
        given = command.make_context(command.name, list(words)).params.get("recipe")
        assert given in PLACEHOLDERS | {None, "", *shipped_recipes()}, f"there is no recipe {given}"


def wait_until(condition: Callable[[], object], seconds: float = 120) -> bool:
    """Wait until something is true, at most this long; whether it became true."""
    deadline = time.monotonic() + seconds
    while not (is_true := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.1)
    return is_true


@contextmanager
def in_a_terminal(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """The leader of a process group, which listens to Ctrl-C; killed at the end."""

    def listen() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen
    )
    with process:
        try:
            yield process
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def check_ctrl_c(command: Sequence[str], begun: Callable[[], object], times: int = 1) -> None:
    """Press Ctrl-C once the command has begun: it ends, says so, and leaves no process behind."""
    with in_a_terminal(command) as process:
        assert wait_until(begun)
        for _ in range(times):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.1)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Interrupted; the same command resumes from here." in output
    assert "Traceback" not in errors
    assert wait_until(lambda: not group_members(process.pid), seconds=20)


def group_members(group: int) -> list[str]:
    """Commands of the living processes of a process group (zombies do not live)."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def forks() -> BaseContext:
    """Processes that are forked from one that imports Avalanche, and Transformers if the tests do,
    once for all tests."""
    modules = ["avalanche.training", "covon_avalanche.experiment.run"]
    if "transformers" in sys.modules:
        modules += ["transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "peft"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules)
    return context


def in_two_processes(work: Callable[..., None], *arguments: object) -> None:
    """Call ``work(rank, *arguments)`` in two processes."""
    forks()
    mp.start_processes(_work, args=(work, *arguments), nprocs=2, start_method="forkserver")


def _work(rank: int, work: Callable[..., None], *arguments: object) -> None:
    gc.freeze()  # what was imported, so that runs collect garbage quickly
    work(rank, *arguments)


def covon_when_both_are_ready(rank: int, command: list[str], folder: str) -> None:
    """Run ``covon`` in one of two processes, its runs in a thread, and store what it prints."""
    grid.WorkerPool = ThreadPoolExecutor
    Path(folder, f"ready-{rank}").touch()
    wait_until(Path(folder, f"ready-{1 - rank}").exists)
    Path(folder, f"printed-{rank}.txt").write_text(covon(*command).output, encoding="utf-8")


def torchrun(script: Path, *arguments: object) -> str:
    """What a script prints in two processes, which find each other as those of torchrun do."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    about = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment = {**os.environ, **about, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    words = [str(script), *map(str, arguments)]
    in_two_processes(_run_script, words, environment, str(Path.cwd()))
    return "".join(Path(f"printed-{rank}.txt").read_text("utf-8") for rank in range(2))


def _run_script(rank: int, words: list[str], environment: dict[str, str], folder: str) -> None:
    os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(folder)
    sys.argv = words
    printed = Path(f"printed-{rank}.txt")
    with printed.open("w", encoding="utf-8") as file, redirect_stdout(file):
        runpy.run_path(words[0], run_name="__main__")
