"""What is said while a model is fetched or converted: on stderr, so that stdout stays the result's."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


def notice(text: str) -> None:
    """One line on stderr."""
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(text)


@contextmanager
def download_bar(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, one line elsewhere. Yields a function to be told the bytes that have arrived."""
    console = Console(stderr=True)
    if not console.is_terminal:
        notice(f"{title} ({total_bytes / 1e6:.0f} MB)")
        yield lambda arrived_bytes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda arrived_bytes: progress.update(task, completed=min(arrived_bytes, total_bytes))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers writes nothing: exceptions carry what matters. Its GGUF reader draws bars that no setting stops."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
