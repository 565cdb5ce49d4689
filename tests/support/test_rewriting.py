from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

from tests.support.rewriting import modules_of, rewrite_all


def test_pytest_takes_what_was_made_of_modules_for_its_own(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("conftest.py", "test_one.py", "a/test_two.py", "a/conftest.py", "a/helper.py")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def test() -> None:\n    assert 1 + 1 == 3\n")
    modules = modules_of([tmp_path / "a", tmp_path / "test_one.py", tmp_path / "test_nowhere.py"])
    assert {path.relative_to(tmp_path).as_posix() for path in modules} == {
        "test_one.py",
        "a/test_two.py",
        "a/conftest.py",
    }
    rewrite_all(pytestconfig, modules)
    for module in modules:
        (kept,) = (module.parent / "__pycache__").glob(f"{module.stem}.*")
        code = rewrite._read_pyc(module, kept)
        assert code is not None
        names_of = dict[str, Any]()
        assert code.co_filename == str(module)
        exec(code, names_of)
        with pytest.raises(AssertionError, match=r"assert \(1 \+ 1\) == 3"):
            names_of["test"]()
    monkeypatch.setattr(rewrite, "_rewrite_test", lambda *_: pytest.fail("it is kept already"))
    rewrite_all(pytestconfig, modules)


def test_a_module_that_is_broken_is_left_to_who_runs_it(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "test_broken.py").write_text("def test(:")
    rewrite_all(pytestconfig, modules_of([tmp_path]))
    assert list(tmp_path.glob("__pycache__/*")) == []
