import json

import pytest
import torch

from funcpipe.errors import CorruptMessage, PlanError
from funcpipe.neighbours.parameter_server.server import Applied, ParameterServer, ServerCheckpoints
from tests.neighbours.parameter_server.conftest import RUN, stored_adam

FOLDER = f"{RUN}/server/checkpoints/"


def test_a_server_is_read_as_it_was_saved_and_two_checkpoints_are_kept() -> None:
    _, sent, storage = stored_adam()
    server, saved = ParameterServer(sent), ServerCheckpoints(storage, RUN)
    assert not saved.restore_into(server)
    for version in (3, 4, 10):
        server.version, server.applied = version, Applied(version, [version + 2])
        saved.save(server)
    assert len(storage.list(FOLDER)) == 4
    again = ParameterServer(sent)
    assert saved.restore_into(again)
    assert (again.version, again.applied.below, again.applied.beyond) == (10, 10, {12})
    for name, tensor in server.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("field", "value"), [("sha256", "0" * 64), ("settings", "{}"), ("progress", {"version": "x"}), ("aliases", None)]
)
def test_a_damaged_checkpoint_is_told(field: str, value: object) -> None:
    _, sent, storage = stored_adam()
    server, saved = ParameterServer(sent), ServerCheckpoints(storage, RUN)
    saved.save(server)
    (key,) = [key for key in storage.list(FOLDER) if key.endswith(".json")]
    document = json.loads(storage.get(key))
    document[field] = value
    storage.put(key, json.dumps(document).encode())
    with pytest.raises(CorruptMessage):
        saved.restore_into(ParameterServer(sent))


def test_a_step_is_not_taken_while_gradients_are_missing() -> None:
    job, sent, _ = stored_adam()
    (step, *_) = job.batches.epoch(0)
    with pytest.raises(PlanError, match="were not pushed"):
        ParameterServer(sent).update(step, range(4))


def test_applied_ids_are_told_by_a_number_and_what_is_beyond() -> None:
    applied = Applied()
    applied.add([3, 1])
    assert (applied.below, applied.beyond) == (0, {1, 3})
    assert 1 in applied
    assert 0 not in applied
    applied.add([0, 2])
    assert (applied.below, applied.beyond) == (4, set())
