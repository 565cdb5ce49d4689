"""The page of troubleshooting goes by messages that the code really has."""

import ast
import re

from tests.docs.pages import DOCS, ROOT

MESSAGES = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)


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


def test_messages_are_in_the_code() -> None:
    missing, found = dict.fromkeys(MESSAGES), texts()
    for message in MESSAGES:
        parts = [part for part in message.split("…") if part]
        wanted = re.compile(".*".join(map(re.escape, message.split("…"))), flags=re.DOTALL)
        if any(wanted.search(text) for text in found if all(part in text for part in parts)):
            del missing[message]
    assert list(missing) == []
