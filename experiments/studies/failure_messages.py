"""What a person is told when a run fails: real runs over local functions and files, ended in every way that is common.

Printed for each: the command, its exit code, and the last lines that it says, without the traceback above them.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from funcpipe.core import write
from funcpipe.platforms.catalog import open_storage
from funcpipe.testing import chaos
from funcpipe.testing.processes import all_hosts, children

WAIT_S = 120.0
Words = tuple[str, ...]


def raises(output: Tensor, target: Tensor) -> Tensor:
    """A loss function with a mistake."""
    return F.cross_entropy(output, target.unsqueeze(0))


def exits(output: Tensor, target: Tensor) -> Tensor:
    """A loss function that ends its process as scripts do."""
    sys.exit(3)


def exits_hard(output: Tensor, target: Tensor) -> Tensor:
    """A loss function that ends its process as some libraries do."""
    os._exit(3)


def sleeps(output: Tensor, target: Tensor) -> Tensor:
    """A loss function that never returns."""
    time.sleep(3600)
    return output.mean()


def not_a_number(output: Tensor, target: Tensor) -> Tensor:
    """A loss function that is not one number."""
    return F.cross_entropy(output, target, reduction="none")


def slow(output: Tensor, target: Tensor) -> Tensor:
    """A loss function that leaves time to interfere."""
    time.sleep(0.05)
    return F.cross_entropy(output, target)


class Scene:
    """A folder in which runs keep their objects."""

    def __init__(self, folder: Path) -> None:
        self.url = (folder / "objects").as_uri()
        self.plan = folder / "plan.json"
        write(chaos.job().plan, self.plan)

    def train(self, loss: str, *words: str) -> Words:
        """The words of a command that trains with `loss`."""
        data = ("--plan", str(self.plan), "--data", "funcpipe.testing.chaos:data", "--epochs", "200")
        own = ("--loss", f"experiments.studies.failure_messages:{loss}", "--storage", self.url, "--quiet")
        return ("train", "funcpipe.testing.chaos:model", *data, *own, "--checkpoint", "4", "--no-rehearsal", *words)

    def on(self, verb: str, run: str, *words: str) -> Words:
        """The words of a command on a run."""
        return (verb, run, "--storage", self.url, *words)


def start(words: Words) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "funcpipe", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def tell(title: str, words: Words) -> None:
    """Run a command to its end, and print how it ended."""
    process = start(words)
    said = process.communicate(timeout=WAIT_S)[0].strip().splitlines()
    last = max([i for i, line in enumerate(said) if line.startswith("funcpipe: ")], default=max(len(said) - 8, 0))
    print(f"\n== {title} (exit code {process.returncode})")
    print("\n".join(f"   {line}" for line in said[last : last + 14]), flush=True)


def wait_until(happened: Callable[[], object]) -> None:
    """Return once it has happened."""
    until_s = time.monotonic() + WAIT_S
    while not happened():
        if time.monotonic() > until_s:
            raise SystemExit("what was to be shown did not happen")
        time.sleep(0.1)


def saved(scene: Scene, run: str) -> bool:
    """Whether the run has a checkpoint of every stage."""
    keys = open_storage(scene.url).list(f"{run}/")
    return all(any(f"/checkpoints/s{stage}/" in key and key.endswith(".json") for key in keys) for stage in (0, 1, 2))


def interrupted(scene: Scene, run: str) -> None:
    """Leave a run behind that can be resumed."""
    client = start(scene.train("slow", "--run", run))
    wait_until(lambda: saved(scene, run))
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=WAIT_S)


def in_user_code(scene: Scene) -> None:
    for loss, title in (
        ("raises", "the loss function raises"),
        ("not_a_number", "the loss is not one number"),
        ("exits", "the loss function calls sys.exit"),
        ("exits_hard", "the loss function calls os._exit"),
    ):
        tell(title, scene.train(loss, "--run", loss.replace("_", "-")))
    tell("a message never comes", scene.train("sleeps", "--run", "sleeps", "--message-deadline", "8"))


def of_other_clients(scene: Scene) -> None:
    client = start(scene.train("slow", "--run", "taken"))
    wait_until(lambda: saved(scene, "taken"))
    tell("another client trains the run", scene.train("slow", "--resume", "taken"))
    tell("another client trains a run of that name", scene.train("slow", "--run", "taken"))
    tell("cleaned while a client trains it", scene.on("clean", "taken"))
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=WAIT_S)


def of_dead_runs(scene: Scene) -> None:
    before = set(all_hosts())
    start(scene.train("slow", "--run", "left", "--detach")).communicate(timeout=WAIT_S)
    wait_until(lambda: saved(scene, "left"))
    for host in set(all_hosts()) - before:
        for process in (host, *children(host)):
            os.kill(process, signal.SIGKILL)
    tell("all functions of a detached run were killed", scene.on("status", "left"))


def of_damage(scene: Scene) -> None:
    interrupted(scene, "damaged")
    storage = open_storage(scene.url)
    for key in storage.list("damaged/"):
        if "/checkpoints/s1/" in key:
            data = storage.get(key)
            storage.put(key, data[: len(data) // 2])
    tell("every checkpoint of a stage is damaged", scene.train("slow", "--resume", "damaged"))
    tell("a run that nobody knows", scene.on("status", "nothing"))


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored in a shell's background job
    argparse.ArgumentParser(description=__doc__).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for show in (in_user_code, of_other_clients, of_dead_runs, of_damage):
        with tempfile.TemporaryDirectory() as folder:
            show(Scene(Path(folder)))


if __name__ == "__main__":
    main()
