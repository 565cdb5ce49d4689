"""What stages hold on a device is what the cost model says, whatever the kind of network."""

from typing import Any

import pytest

from funcpipe.core import ScheduleKind
from tests.e2e.device_memory import NETWORKS, adam, peak
from tests.support.stand_in import on_stand_in
from tests.support.stand_in_device import NAME

WAYS: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {"schedule": ScheduleKind.ONE_F_ONE_B},
    "recompute": {"recompute": True},
    "adam": {"optimizer": adam},
}
ALL = [(name, way) for name in NETWORKS for way in WAYS]
OFTEN = {("tied", "gpipe"), ("recurrent", "gpipe"), ("transformer", "recompute"), ("residual", "1f1b")}
OFTEN |= {("mlp", "adam"), ("convolutions", "gpipe")}


@pytest.mark.parametrize(
    ("name", "way"), [case if case in OFTEN else pytest.param(*case, marks=pytest.mark.long) for case in ALL]
)
@on_stand_in
def test_a_device_holds_at_its_peak_what_the_model_says(name: str, way: str) -> None:
    found = peak(NETWORKS[name], NAME, **WAYS[way])
    assert abs(found.off) < 0.04, found
