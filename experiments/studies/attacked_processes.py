"""The files of a run under attack, its surroundings, and the processes of its clients: for `attacks_processes`."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.studies.process_faults import MARK, mark, remount
from funcpipe.errors import FuncPipeError
from tests.support.advice import Left, Wrong, other_acts
from tests.support.attacked_world import BELOW, BESIDE, RUN, TORN
from tests.support.processes import all_functions, all_hosts

LASTS_S = 8.0
"""About so long does a client last; attacks come within."""

DEADLINE_S = 60.0
_WAIT_S, _ENDS_WITHIN_S, _LOOK_S = 240.0, 20.0, 0.02
CLIENT = "experiments.studies.attacks_processes"
"""The module that is a client when it is run."""


class Told(FuncPipeError):
    """What a command has said that ended otherwise than well."""

    def __init__(self, said: str, exit_code: int) -> None:
        super().__init__(said)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Result:
    """What a client has told of its result."""

    tensors: Mapping[str, Tensor]
    losses: tuple[float, ...]

    def state_dict(self) -> Mapping[str, Tensor]:
        """The trained tensors."""
        return self.tensors


@dataclass
class World:
    """The files of a run, its surroundings, and the commands of clients."""

    draw: random.Random
    folder: Path
    keeps_model: bool
    deadline_s: float = DEADLINE_S
    name: str = RUN
    did: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    happened: set[str] = field(default_factory=set)
    environment: dict[str, str] = field(default_factory=dict)
    has_folder: bool = True

    def __post_init__(self) -> None:
        for name in ("objects", "home", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
        (self.folder / "file").touch()
        self.environment = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("FUNCPIPE_", "XDG_")) or name == MARK
        } | {"HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1"}
        self.environment["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "torch")  # torch leaves it behind
        self._of_others: dict[str, tuple[bytes, int]] = {}
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._results = 0

    @property
    def objects(self) -> Path:
        """The folder of all objects."""
        return self.folder / "objects"

    @property
    def url(self) -> str:
        """The storage."""
        return (self.objects if self.has_folder else self.folder / "file" / "objects").as_uri()

    def let_happen(self, attacks: Collection[str]) -> None:
        """Spoil folders, let others have objects, and let happen what comes at some moment."""
        self._put_of_others(BESIDE)
        below = [f"{RUN}/{key}" for key in BELOW]
        if "BELOW" in attacks:
            self._put_of_others(below)
        if "KEYS" in attacks:
            self.environment["HOME"] = str(self.folder / "file")
        if "LOGS" in attacks:
            nowhere = str(self.folder / "file" / "x")
            self.environment |= {"FUNCPIPE_LOG_DIR": nowhere, "FUNCPIPE_HISTORY": nowhere}
        self.has_folder = "FOLDER" not in attacks
        happens: dict[str, Callable[[], None]] = {
            "LATER": lambda: self._put_of_others(below),
            "KEYS_LOST": self._lose_keys,
            "STOPPED": self._stop_by_other,
            "DISK": self._spoil_disk,
        }
        for attack in [name for name in happens if name in attacks]:
            self._start(self._later, self.draw.uniform(0, LASTS_S), happens[attack])
        if "AGE" in attacks:
            self._start(self._age, self.draw.uniform(0.7, 4.0))
        if "TORN" in attacks:
            self._start(self._tear, self.draw.choice(TORN), self.draw.choice((1, 1, 2, 3)))

    def heal(self) -> None:
        """Let nothing more happen, and clients wait for long."""
        self.deadline_s = DEADLINE_S
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        if "refused to write" in self.happened:
            remount(str(self.objects), "rw")

    def becomes(self, **changes: Any) -> None:
        """Keep objects in another folder."""
        self.has_folder = changes["has_folder"]

    def set_keys(self) -> None:
        """Keep keys in a folder that can be written."""
        self.environment["FUNCPIPE_KEY_DIR"] = str(self.folder / "home" / "keys")

    def begin(self) -> Result:
        """Train a new run."""
        return self._result(self._client("begin"))

    def resume(self, *, take_over: bool = False, from_start: bool = False) -> Result:
        """Go on with the run, watch it, or collect it."""
        words = ["--take-over"] * take_over + ["--from-start"] * from_start
        return self._result(self._client("resume", *words))

    def clean(self, *, take_over: bool = False) -> None:
        """Delete the run."""
        self._verb("clean", *["--take-over"] * take_over)

    def stop(self) -> None:
        """End the run after a step."""
        self._verb("stop", "--wait", "10")

    def status(self) -> None:
        """Ask how the run is; that a run has failed or died is an answer."""
        self._verb("status", allowed=(0, 1, 3))

    def slept(self, note: Callable[[FuncPipeError], None]) -> Left:
        """Train with a client that is stopped at some moment, while another one does something to the run."""
        client = self._client("begin")
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.process.wait(self.draw.uniform(0, LASTS_S))
        if client.process.poll() is not None:
            return self._result(client)
        client.process.send_signal(signal.SIGSTOP)
        try:
            result = other_acts(self, note)
        finally:
            client.process.send_signal(signal.SIGCONT)
        try:
            return self._result(client)
        except FuncPipeError as error:
            if result is None:
                raise
            note(error)
            return result

    def own(self) -> list[str]:
        """The keys of all objects but those of others."""
        return [key for key in self._keys() if key not in self._of_others]

    def check_left(self) -> None:
        """Raise Wrong if of others anything was touched, or if of the run anything is left besides its objects."""
        touched = [key for key, what in self._of_others.items() if self._seen(key) != what]
        if touched:
            raise Wrong(f"of others is touched: {touched}")
        files = [path.name for path in (self.folder / "tmp").iterdir()]
        if "let objects expire" not in self.happened:  # nobody sees a run vanish
            files += [path.name for keys in self.folder.glob("home/**/keys") for path in keys.iterdir()]
        if files:
            raise Wrong(f"files are left: {files}")
        until_s = time.monotonic() + _ENDS_WITHIN_S
        while (left := {*all_hosts(mark()), *all_functions(mark())}) and time.monotonic() < until_s:
            time.sleep(0.1)
        if left:
            raise Wrong(f"{len(left)} processes are left")

    def _client(self, verb: str, *words: str) -> "_Command":
        self._results += 1
        result = self.folder / f"result-{self._results}"
        words = (*words, "--url", self.url, "--run", self.name, "--result", str(result))
        words += ("--message-deadline", str(self.deadline_s), *(["--keep-model"] if self.keeps_model else []))
        return _Command([sys.executable, "-m", CLIENT, "--client", verb, *words], self.environment, result)

    def _result(self, client: "_Command") -> Result:
        client.end()
        told = torch.load(client.result)
        return Result(told["tensors"], tuple(told["losses"]))

    def _verb(self, verb: str, *words: str, allowed: Collection[int] = (0,)) -> None:
        words = (sys.executable, "-m", "funcpipe", "run", verb, self.name, "--storage", self.url, *words)
        _Command(list(words), self.environment, self.folder / "none").end(allowed)

    def _keys(self) -> list[str]:
        folders = os.walk(self.objects)  # unlike rglob, not put off by a folder that vanishes meanwhile
        found = (Path(folder) / name for folder, _, names in folders for name in names)
        keys = (str(path.relative_to(self.objects)) for path in found)
        return sorted(key for key in keys if not key.startswith(".unfinished/"))

    def _seen(self, key: str) -> tuple[bytes, int] | None:
        path = self.objects / key
        return (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None

    def _put_of_others(self, keys: Collection[str]) -> None:
        for key in keys:
            path = self.objects / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(f"of others: {key}".encode())
            self._of_others[key] = (path.read_bytes(), path.stat().st_mtime_ns)

    def _start(self, target: Callable[..., None], *words: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=words))
        self._threads[-1].start()

    def _later(self, seconds: float, happens: Callable[[], None]) -> None:
        if not self._over.wait(seconds):
            happens()

    def _lose_keys(self) -> None:
        for path in self.folder.glob("home/**/keys/*"):
            path.unlink(missing_ok=True)
            self.happened.add("lost keys")

    def _stop_by_other(self) -> None:
        self.did.append("another: stop")
        with contextlib.suppress(FuncPipeError):  # as the run may not have begun, or has ended
            self.stop()

    def _spoil_disk(self) -> None:
        remount(str(self.objects), "ro")
        self.happened.add("refused to write")

    def _age(self, lives_s: float) -> None:
        while not self._over.wait(_LOOK_S):
            for key in self.own():
                with contextlib.suppress(OSError):  # it was deleted just now
                    if time.time() - (self.objects / key).stat().st_mtime > lives_s:
                        (self.objects / key).unlink()
                        self.happened.add("let objects expire")

    def _tear(self, part: str, nth: int) -> None:
        seen: set[str] = set()
        while not self._over.wait(_LOOK_S / 4):
            for key in self.own():
                if part not in f"/{key}" or key in seen:
                    continue
                seen.add(key)
                if len(seen) == nth:
                    with contextlib.suppress(OSError):  # it was deleted just now
                        os.truncate(self.objects / key, (self.objects / key).stat().st_size // 2)
                        self.happened.add(f"tore {key}")
                    return


class _Command:
    """A process of a client."""

    def __init__(self, words: list[str], environment: Mapping[str, str], result: Path) -> None:
        self.result = result
        self.process = subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def end(self, allowed: Collection[int] = (0,)) -> None:
        """Wait for its end. Raises Told unless its exit code is one of those `allowed`, and Wrong for a traceback."""
        try:
            said = self.process.communicate(timeout=_WAIT_S)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise Wrong(f"{self.process.args!r} hangs") from None
        if self.process.returncode in allowed:
            return
        found = re.search(r"^funcpipe: .*", said, re.MULTILINE | re.DOTALL)
        if found is None:
            raise Wrong(f"ends with {self.process.returncode} and says: {said[-600:]!s}")
        raise Told(found[0].removeprefix("funcpipe: "), self.process.returncode)
