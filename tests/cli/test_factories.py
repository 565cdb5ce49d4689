import importlib.util
import os
import sys
from pathlib import Path

import pytest

from funcpipe.cli.factories import check_names, load_data, load_factory
from funcpipe.errors import InputError


def test_data_is_a_factory_or_a_url() -> None:
    assert load_data("s3://texts/tokens?region=eu-central-1") == "s3://texts/tokens?region=eu-central-1"
    assert load_data("collections:OrderedDict")() == {}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, of which nothing is imported yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [name for name in sys.path if name != os.getcwd()])
    return tmp_path


@pytest.mark.parametrize("is_first", [False, True])
def test_modules_of_the_current_folder_hide_installed_ones_and_none_of_python_s(
    is_first: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a platform.py beside the model keeps torch from being imported."""
    if is_first:  # as under `python -m funcpipe`
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    (folder / "platform.py").write_text("raise AssertionError('taken for that of Python')")
    (folder / "hypothesis.py").write_text("")
    (folder / "of_this_test.py").write_text("def make(): return 3")
    assert load_factory("of_this_test:make")() == 3
    for name, place in (("platform", os.__file__), ("hypothesis", str(folder / "any"))):
        monkeypatch.delitem(sys.modules, name)
        found = importlib.util.find_spec(name)
        assert found is not None
        assert os.path.dirname(found.origin or "") == os.path.dirname(place)
    assert sys.path.count(str(folder)) == 1


def test_a_module_that_has_the_name_of_one_of_python_s_is_told_at_once(folder: Path) -> None:
    (folder / "platform.py").write_text("def make(): return 3")
    with pytest.raises(InputError, match=r"^the model: platform is also a module of Python .*: rename .*/platform.py$"):
        check_names({"the model": "platform:make"})
    with pytest.raises(InputError, match=r"^platform:schedule: platform is also a module of Python .*: rename "):
        load_factory("platform:schedule")
    (folder / "calendar").mkdir()
    with pytest.raises(InputError, match=r"^--data: calendar is also a module of Python .*: rename .*/calendar$"):
        check_names({"--data": "calendar.data:make"})


def test_what_a_module_raises_is_told_with_its_own_line_and_none_of_python_s(folder: Path) -> None:
    (folder / "of_a_sum.py").write_text("x = 1\ny = x / 0\n")
    (folder / "without_sense.py").write_text("def (")
    with pytest.raises(InputError, match=r"raised ZeroDivisionError.*of_a_sum\.py, line 2\)"):
        load_factory("of_a_sum:make")
    with pytest.raises(InputError, match="raised SyntaxError") as told:
        load_factory("without_sense:make")
    assert "frozen" not in str(told.value)
