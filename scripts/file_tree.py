"""Writes docs/files.md: every file of the package with the first sentence of its docstring, room by room."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "funcpipe"
TARGET = ROOT / "docs" / "files.md"
HEAD = """# Files

Every file of the package, with what its docstring says first. Who may import whom: [architecture](architecture.md).
`python scripts/file_tree.py` writes this page anew.
"""


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for folder in (PACKAGE, *sorted(path for path in PACKAGE.rglob("*") if path.is_dir())):
        files = sorted(folder.glob("*.py"))
        if files:
            about = next((first_sentence(file) for file in files if file.name == "__init__.py"), "")
            title = f"`{folder.relative_to(ROOT).as_posix()}/`"
            parts.append(f"\n**{title}** {about}\n\n".replace("** \n", "**\n"))
            parts += [f"- `{file.name}`: {first_sentence(file)}\n" for file in files if file.name != "__init__.py"]
    return "".join(parts)


def first_sentence(path: Path) -> str:
    """What a module's docstring begins with, in one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


if __name__ == "__main__":
    TARGET.write_text(page())
