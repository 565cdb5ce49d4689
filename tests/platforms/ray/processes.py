"""The processes of the Ray that tests have started, by the titles that Ray gives them."""

import os

import psutil


def named(beginning: str) -> list[psutil.Process]:
    """Those whose title begins so: `ray::RUN/WORKER` of a function."""
    return [process for process in _ours() if title_of(process).startswith(beginning)]


def processes_of(run: str) -> list[psutil.Process]:
    """Those that run functions of a run now, or its watchdog."""
    return named(f"ray::{run}/")


def title_of(process: psutil.Process) -> str:
    """Empty once it has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.NoSuchProcess:
        return ""


def _ours() -> list[psutil.Process]:
    """All that this process has started, and what they have."""
    found: list[psutil.Process] = psutil.Process(os.getpid()).children(recursive=True)
    return found
