"""The page of troubleshooting goes by messages that the code really has."""

import ast
import re

import pytest

from tests.docs.pages import DOCS, ROOT

MESSAGES = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every text in the package, with `…` for what is filled in."""
    found = []
    for path in (ROOT / "funcpipe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 25
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_code(message: str, texts: list[str]) -> None:
    parts = [re.escape(part) for part in message.split("…")]
    assert any(re.search(".*".join(parts), text, flags=re.DOTALL) for text in texts)
