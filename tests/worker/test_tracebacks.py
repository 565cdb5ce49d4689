"""The traceback that a user sees of an exception in a function."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from funcpipe.errors import CorruptMessage, DataError
from funcpipe.worker.attempt import describe, user_traceback


class Divides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (1 // 0)


def raised(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as found:
        call()
    return found.value


def text(call: Callable[[], Any]) -> str:
    found = user_traceback(raised(call))
    assert found is not None
    return found


def test_the_user_s_frames_are_shown_and_the_others_counted() -> None:
    model = nn.Sequential(nn.Sequential(Divides()))
    shown = text(lambda: model(torch.ones(1)))
    lines = shown.splitlines()
    assert "test_tracebacks.py" in lines[1]
    assert "frames of torch" in shown
    assert "return x / (1 // 0)" in shown
    assert "_call_impl" not in shown
    assert lines[-1] == "ZeroDivisionError: integer division or modulo by zero"


def test_the_frame_that_raised_is_shown_whosever_it_is() -> None:
    shown = text(lambda: nn.Linear(2, 2)(torch.ones(1, 3)))
    assert "return F.linear" in shown
    assert "mat1 and mat2 shapes cannot be multiplied" in shown
    assert "_call_impl" not in shown


def test_what_led_to_an_error_is_shown_alike() -> None:
    def load() -> None:
        try:
            Divides()(torch.ones(1))
        except ZeroDivisionError as error:
            raise DataError("sample 3 cannot be loaded") from error

    shown = text(load)
    assert shown.index("return x / (1 // 0)") < shown.index("direct cause") < shown.index("sample 3 cannot be loaded")


def test_an_error_of_ours_that_no_code_of_the_user_led_to_has_none() -> None:
    error = CorruptMessage("x: wrong checksum")
    assert user_traceback(error) is None
    assert describe(error) == "CorruptMessage: x: wrong checksum"


def test_an_error_in_code_that_is_not_the_user_s_has_all_frames() -> None:
    code = compile("def f(): g()\ndef g(): raise KeyError('x')\nf()", "<string>", "exec")
    error = raised(lambda: exec(code, {}))
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]
    shown = user_traceback(error)
    assert shown is not None
    assert shown.count("<string>") == 3


@pytest.mark.parametrize(("code", "call"), [(None, "sys.exit()"), (3, "sys.exit(3)"), ("done", "sys.exit('done')")])
def test_sys_exit_is_called_that(code: object, call: str) -> None:
    error = raised(lambda: sys.exit(code))  # type: ignore[arg-type]
    assert describe(error).startswith(f"SystemExit: your code has called {call}, ")
