"""Functions that say something, in a module that loads little: each host of theirs loads it."""

import os
import subprocess
import sys
import time

from funcpipe.core import logs


def talk(payload: str) -> None:
    """Print from Python, from a child process and without an end of line, and log in between."""
    with logs.in_function(run="run-1", worker="s0.r0", attempt=0):
        print("to output")
        time.sleep(0.01)  # so that what is printed and what is logged have different times
        os.system("echo by a child >&2")
        time.sleep(0.01)
        logs._log.warning("logged\nin two lines")
        time.sleep(0.01)
        print("no end", end="", file=sys.stderr)


def talk_and_hang(payload: str) -> None:
    print("before it is killed")
    time.sleep(600)


def shout(payload: str) -> None:
    for number in range(20_000):
        print(number)


def start_one_that_prints_on(payload: str) -> None:
    """Leave a process in a group of its own, which ends after its host has stopped listening."""
    subprocess.Popen([sys.executable, "-c", SPAM], start_new_session=True)
    print("begun")


SPAM = """
import os, time
try:
    while True:
        os.write(1, b"x" * 100)
        time.sleep(0.001)
except BrokenPipeError:
    pass
"""
