from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.core import ScheduleKind, write, write_trace
from funcpipe.errors import InputError
from funcpipe.show.side_by_side import side_by_side
from tests.show.large import material


def test_plans_and_traces_side_by_side(tmp_path: Path) -> None:
    made = material(steps=2)
    assert made.plan is not None
    assert made.predicted is not None
    assert made.observed is not None
    plans = [str(tmp_path / name) for name in ("a.json", "b.json")]
    write(made.plan, plans[0])
    write(replace(made.plan, schedule=ScheduleKind.ONE_F_ONE_B, estimate=None), plans[1])
    found = side_by_side(plans)
    assert found.rows["schedule"] == ("gpipe", "1f1b")
    assert found.rows["cuts before layer"] == ("2", "2")
    assert found.rows["iteration s"][1] == ""
    assert "iteration s" not in found.plain()[plans[1]]
    traces = [str(tmp_path / name) for name in ("p.json", "o.json")]
    write_trace(made.predicted, traces[0])
    write_trace(made.observed, traces[1])
    found = side_by_side(traces)
    assert found.rows["steps"] == ("1", "2")
    assert found.rows["functions"] == ("4", "4")
    shares = [float(values[1]) for what, values in found.rows.items() if what.endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    with pytest.raises(InputError, match="one kind of file"):
        side_by_side([plans[0], traces[0]])
