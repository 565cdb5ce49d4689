"""What attempts leave in the environment that they run in one after another: nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe.client.follow.launch import upload
from funcpipe.core import Outcome, WorkerReport, to_text
from funcpipe.platforms import process as allocator
from funcpipe.platforms.local.files import FileStorage
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.keys import Keys
from tests.e2e import small
from tests.e2e.plans import even_plan
from tests.in_process import make_job, prepared_run
from tests.support.run_keys import NONCE, signed_for_tests

WIDE = 1800
"""Two layers of 13 MB each: with gradients and momentum some 80 MB."""

_STATUS = Path("/proc/self/status")
_ENVIRONMENT = """
import gc, sys
from pathlib import Path
from funcpipe.platforms import process as allocator
from funcpipe.platforms import entry as function
for file in sys.argv[1:]:
    function.main(Path(file).read_text())
    function.free_memory()
    from funcpipe.comm.channel import Channel
    from funcpipe.core.run_key import RunKey
    from funcpipe.runstate.lease import Lease
    from funcpipe.training.computation import Computation
    from funcpipe.worker.loop import Worker
    own = [item for item in gc.get_objects() if type(item) in (Channel, Lease, Computation, RunKey, Worker)]
    print(len(own), Path("/proc/self/statm").read_text().split()[1])
    if file == sys.argv[1]:
        hungry = bytearray(b"1") * 300_000_000  # as another function here might have been
        del hungry
        allocator.trim()
"""


def keys(number: int) -> Keys:
    return Keys(f"run-{number}", 0, NONCE)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(WIDE, generator=generator), torch.tensor(number % 10)) for number in range(16)]


@pytest.mark.skipif(not _STATUS.exists(), reason="needs Linux")
def test_an_environment_has_its_memory_back_after_each_attempt_and_each_reports_its_own_peak(tmp_path: Path) -> None:
    storage, payloads = FileStorage(tmp_path / "objects"), []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE))
    plan = even_plan(model, (torch.zeros(2, WIDE),), stages=1, replicas=1, micro_batch=2, micro_batches=2)
    job = make_job(model, plan, data, loss=F.cross_entropy, optimizer=small.optimizer)
    for number in range(4):
        (spec,) = upload(prepared_run(job, storage, storage_url=(tmp_path / "objects").as_uri()), keys(number))
        payloads.append(tmp_path / f"payload-{number}")
        payloads[-1].write_text(to_text(spec))
    command = [sys.executable, "-c", _ENVIRONMENT, *map(str, payloads)]
    told = subprocess.run(command, env=allocator.environment(), capture_output=True, text=True, check=True).stdout
    left = [tuple(map(int, line.split())) for line in told.splitlines()]
    assert [objects for objects, _ in left] == [0] * 4
    pages = [pages for _, pages in left]
    assert max(pages[1:]) <= 1.05 * pages[0]
    reports = [
        get_document(signed_for_tests(storage), WorkerReport, keys(number).worker_report("s0.r0", 0))
        for number in range(4)
    ]
    assert {report.outcome for report in reports} == {Outcome.FINISHED}
    peaks = [report.peak_memory_bytes for report in reports]
    assert max(peaks) < 1.05 * min(peaks)  # and no attempt has the 300 MB in between
