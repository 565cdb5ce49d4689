"""Whoever waits for a file sleeps until something happens in its folder."""

import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from funcpipe.platforms.local.files import FolderWatch
from tests.support.waiting import LONG_S

pytestmark = pytest.mark.skipif(not FolderWatch.available, reason=f"{sys.platform} does not tell what comes")


class Counting(FolderWatch):
    """Counts how often it is told something."""

    def __init__(self) -> None:
        super().__init__()
        self.told = 0

    def _read(self, timeout_s: float) -> None:
        before = self._news
        super()._read(timeout_s)
        self.told += self._news - before


@pytest.mark.parametrize("waiting", [1, 2])
def test_other_files_disturb_once_each(tmp_path: Path, waiting: int) -> None:
    watch, cancel = Counting(), threading.Event()
    folders = [tmp_path / str(i) for i in range(waiting)]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(waiting) as pool:
        waits = [pool.submit(watch.wait, str(folder / "mine"), 20, cancel) for folder in folders]
        for number in range(5):
            for folder in folders:
                (folder / f"other {number}").touch()
            cancel.wait(0.05)
        for folder in folders:
            (folder / "mine").touch()
        for wait in waits:
            wait.result()
    assert watch.told <= 6 * waiting + waiting  # and what watches say when they end


def test_a_folder_that_comes_and_goes_is_watched_when_it_is_there(tmp_path: Path) -> None:
    watch, cancel = Counting(), threading.Event()
    path = tmp_path / "a" / "b" / "mine"
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(watch.wait, str(path), 20, cancel)
        for _ in range(3):
            path.parent.mkdir(parents=True)
            cancel.wait(0.02)
            path.parent.rmdir()
            path.parent.parent.rmdir()
        path.parent.mkdir(parents=True)
        os.replace(_new(tmp_path / "unfinished"), path)
        wait.result()
    assert path.exists()


class Renewing(FolderWatch):
    """Something comes into the folder that is watched; after that news it is another one of the same name."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.renewed = threading.Event()

    def _read(self, timeout_s: float) -> None:
        before = self._news
        if not self.renewed.is_set():
            (self.folder / "other").touch()
        super()._read(timeout_s)
        if self._news > before and not self.renewed.is_set():
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            self.renewed.set()


def test_a_folder_that_is_made_anew_is_watched_anew(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    watch, cancel = Renewing(folder), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(watch.wait, str(folder / "mine"), 600, cancel)
        try:
            assert watch.renewed.wait(LONG_S)
            cancel.wait(0.3)  # what was told of the old folder has been read
            (folder / "mine").touch()
            wait.result(timeout=LONG_S)
        finally:
            cancel.set()


def test_a_wait_can_be_cancelled_and_ends_in_time(tmp_path: Path) -> None:
    watch, cancel = FolderWatch(), threading.Event()
    watch.wait(str(tmp_path / "mine"), 0.01, cancel)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(watch.wait, str(tmp_path / "mine"), 600, cancel)
        cancel.set()
        wait.result()
    assert not (tmp_path / "mine").exists()


def _new(path: Path) -> Path:
    path.touch()
    return path
