"""The check of a GPU runs on the stand-in, says so, and fails where a bit differs."""

import contextlib
import io
import json
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from experiments.studies import gpu
from tests.support.stand_in import on_stand_in


@pytest.mark.long
@on_stand_in
def test_it_says_that_it_ran_on_the_stand_in_and_ends_with_1_where_a_bit_differs() -> None:
    with mock.patch.dict(gpu.CUTS, {"transformer": ((2, 1),)}, clear=True), tempfile.TemporaryDirectory() as folder:
        table, text = Path(folder, "gpu.json"), io.StringIO()
        with contextlib.redirect_stdout(text):
            assert gpu.main(["--json", str(table)]) == 0
        written = json.loads(table.read_text())
        assert text.getvalue().startswith("on the stand-in")
        assert (written["is_real"], [row["difference"] for row in written["rows"]]) == (False, [0.0])
        with mock.patch.object(gpu, "row", return_value={**written["rows"][0], "difference": 1e-9}):
            assert gpu.main([]) == 1
