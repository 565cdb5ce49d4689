"""Texts that others have written: how much of them is kept, and what they cannot do."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import funcpipe
from funcpipe.core.texts import error_line, error_text, printable, shortened, without_surrogates

any_text = st.text(st.characters(exclude_categories=()))


@given(text=any_text, kept=st.integers(1, 20))
def test_a_text_keeps_its_beginning_and_its_end(text: str, kept: int) -> None:
    short = shortened(text, kept=kept)
    if len(text) <= 2 * kept:
        assert short == text
    else:
        assert short.startswith(text[:kept])
        assert short.endswith(text[-kept:])
        assert f"\n… {len(text) - 2 * kept:,} characters are left out here …\n" in short


@pytest.mark.parametrize("text_of", [error_text, error_line])
def test_ten_megabytes_in_an_exception_are_eight_kilobytes_of_text(text_of: object) -> None:
    assert callable(text_of)
    said = text_of(ValueError("<html>" + 10_000_000 * "x" + "</html>"))
    assert said.startswith("ValueError: <html>xxx")
    assert said.endswith("xxx</html>")
    assert 8_192 < len(said) < 8_300


def test_the_first_line_of_an_error_is_named_with_its_kind() -> None:
    assert error_line(ValueError("\n  one\ntwo\n")) == "ValueError: one"
    assert error_line(ValueError()) == "ValueError: no message"


@given(text=any_text)
def test_what_is_printable_commands_no_terminal_and_keeps_its_length(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert shown.encode().decode() == shown
    assert not any((ord(sign) < 32 and sign not in "\n\t") or 127 <= ord(sign) < 160 for sign in shown)
    assert printable(shown) == shown


@given(text=st.text(st.characters(exclude_categories=["C"]) | st.sampled_from("\n\t")))
def test_letters_of_all_scripts_are_shown_as_they_are(text: str) -> None:
    assert printable(text) == text


@given(text=any_text)
def test_text_without_surrogates_can_be_written(text: str) -> None:
    with io.TextIOWrapper(io.BytesIO(), encoding="utf-8") as file:
        file.write(without_surrogates(text))


def test_messages_quote_errors_by_one_function() -> None:
    """A message that puts the kind and the text of an error together by itself would let all of it in."""
    by_hand = re.compile(r"type\((\w+)\)\.__name__\}: \{\1\}")
    modules = [path for path in Path(funcpipe.__file__).parent.rglob("*.py") if path.parent.name != "testing"]
    found = [path.name for path in modules if by_hand.search(path.read_text())]
    assert sorted(found) == ["errors.py", "texts.py"]
