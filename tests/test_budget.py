"""How much there is to know: each room keeps to a budget of statements, classes and public names.

Lower a number when its room becomes smaller. To raise one, say in the commit which feature it is for, and what that
replaces.
"""

import ast
from pathlib import Path
from typing import NamedTuple, TypeGuard

import funcpipe
from funcpipe.cli.commands import Commands

PACKAGE = Path(__file__).parents[1] / "funcpipe"


class Size(NamedTuple):
    """Statements, classes, and functions and classes with public names at the top of modules."""

    statements: int
    classes: int
    public: int


ROOMS = {
    "analysis": Size(477, 6, 21),
    "api": Size(633, 9, 15),
    "cli": Size(2396, 16, 116),
    "client": Size(5092, 53, 197),
    "comm": Size(1423, 25, 60),
    "core": Size(3427, 135, 226),
    "data": Size(524, 17, 18),
    "examples": Size(41, 0, 6),
    "loggers": Size(363, 6, 8),
    "model": Size(6199, 97, 242),
    "neighbours": Size(3800, 72, 201),
    "partitioner": Size(5837, 73, 282),
    "platforms": Size(6705, 107, 264),
    "profiler": Size(1059, 15, 46),
    "runstate": Size(2636, 41, 138),
    "scheduler": Size(2085, 42, 66),
    "show": Size(1764, 11, 98),
    "sweep": Size(1176, 22, 22),
    "testing": Size(839, 19, 23),
    "training": Size(6003, 107, 208),
    "worker": Size(2402, 38, 49),
}
"""The budget of each folder of `funcpipe`."""

SLACK = 0.02
"""The share by which a room may be below its budget before that must be lowered."""

MODULES, LINES, EXPORTED, VERBS = 592, 90_181, 82, 18
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 400, 60


def size_of(room: Path) -> Size:
    modules = [ast.parse(path.read_text()) for path in room.rglob("*.py")]
    nodes = [node for module in modules for node in ast.walk(module)]
    top = [node for module in modules for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return Size(
        sum(isinstance(node, ast.stmt) for node in nodes),
        sum(isinstance(node, ast.ClassDef) for node in nodes),
        sum(not node.name.startswith("_") for node in top),
    )


def test_every_room_keeps_to_its_budget() -> None:
    found = {room.name: size_of(room) for room in PACKAGE.iterdir() if any(room.rglob("*.py"))}
    assert found.keys() == ROOMS.keys()
    over = {room: size for room, size in found.items() if any(a > b for a, b in zip(size, ROOMS[room], strict=True))}
    assert not over, "make these rooms smaller"
    lower = {room: size for room, size in found.items() if size.statements < (1 - SLACK) * ROOMS[room].statements}
    assert not lower, "lower the budget of these rooms"


def test_the_whole_keeps_to_its_budget() -> None:
    files = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert len(files) <= MODULES
    assert sum(text.count("\n") for text in files.values()) <= LINES
    assert len(funcpipe.__all__) <= EXPORTED
    assert len(Commands().list_commands()) <= VERBS
    assert [path for path, text in files.items() if text.count("\n") > LINES_OF_A_FILE] == []
    functions = [node for text in files.values() for node in ast.walk(ast.parse(text)) if is_long(node)]
    assert [function.name for function in functions] == []


def is_long(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    """Return True for a function that is too long, with its signature and without its docstring."""
    if not isinstance(node, ast.FunctionDef):
        return False
    text = ast.get_docstring(node, clean=False)
    return (node.end_lineno or 0) - node.lineno - (text or "").count("\n") - (text is not None) >= LINES_OF_A_FUNCTION
