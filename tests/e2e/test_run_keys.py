"""The key of a run on real processes: nobody but its functions and its client gets to see it."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from funcpipe import FaultTolerance, FuncPipe, Progress, RunInterrupted, clean, open_storage, status
from funcpipe.client.follow.callbacks import EachStep
from funcpipe.runstate.generations import list_generations
from funcpipe.runstate.signing import FOLDER, RUN_KEY, KeyFolder, key_of
from tests.e2e import small
from tests.support.processes import functions_of, hosts_of

QUICK = FaultTolerance(heartbeat_s=0.2, lease_s=60.0, checkpoint_steps=4)


def test_a_run_s_key_is_in_no_object_log_or_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(RUN_KEY)
    monkeypatch.setenv(FOLDER, str(tmp_path / "keys"))
    monkeypatch.setenv("FUNCPIPE_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("FUNCPIPE_LOG", "DEBUG")
    url, seen = (tmp_path / "objects").as_uri(), list[bytes]()

    def written() -> list[Path]:
        return [file for name in ("objects", "logs") for file in (tmp_path / name).rglob("*") if file.is_file()]

    def restarted() -> bool:
        logs = [file for file in (tmp_path / "logs").rglob("*") if file.is_file()]
        return any(b"restarts worker" in file.read_bytes() for file in logs)

    def look(progress: Progress) -> None:
        if progress.step == 2:
            os.kill(functions_of(os.getpid())[0], signal.SIGKILL)  # so that one is restarted
        for process in (*functions_of(os.getpid()), *hosts_of(os.getpid())):
            with contextlib.suppress(OSError):  # it has just ended
                seen.extend(Path(f"/proc/{process}/{what}").read_bytes() for what in ("cmdline", "environ"))
        if progress.step >= 12 and restarted():
            raise KeyboardInterrupt

    torch.manual_seed(5)
    pipe = FuncPipe(small.model(), loss_fn=F.cross_entropy, optimizer=small.optimizer)
    with pytest.raises(RunInterrupted):
        pipe.train(
            small.data,
            plan=small.plan(),
            epochs=100,
            storage=url,
            run="told",
            faults=QUICK,
            callbacks=[EachStep(look)],
        )
    (keys,) = list_generations(open_storage(url), "told")
    key = key_of(KeyFolder(), keys).text
    told = repr(status(open_storage(url), "told"))
    files = written()
    assert any("/payloads/" in str(file) for file in files)
    assert any("/functions/" in str(file) for file in files)
    assert restarted()
    assert len(seen) > 20
    printed = "".join(capfd.readouterr())
    for text in (*seen, *(file.read_bytes() for file in files), *(str(file).encode() for file in files)):
        assert key.encode() not in text
        assert bytes.fromhex(key) not in text
    assert key not in printed + told
    assert clean(open_storage(url), "told") > 0
    assert list((tmp_path / "keys").iterdir()) == []
