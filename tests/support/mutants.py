"""Plant mutants in the product, one at a time, and run the tests that reach their lines until one of them fails.

    python -m tests.support.mutants draw --seed 1 --count 60 --output mutants.json
    python -m tests.support.mutants run mutants.json --coverage out/coverage/data --output found.json

Each kind of change has the same share, on lines at random over all functions of the package but what serves tests
alone. `--coverage` is the data of a run of all tests with
`--cov-context=test`, which says which tests reach a line. Tests that took the least are run first. A tree is changed
while it runs: use a clone of its own. `--share 0/2` and `1/2` run half of the mutants each, in two clones.
"""

import argparse
import ast
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from coverage import CoverageData

PACKAGE = "funcpipe"
_QUICK_S = 0.2
_WHOLE_S = 900.0
_TURNED: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A change of one place: `before` stands at `line` (from 1), `column`, and becomes `after`."""

    file: str
    line: int
    column: int
    kind: str
    before: str
    after: str
    text: str


def mutants_of(source: str, file: str) -> Iterator[Mutant]:
    """All mutants of the functions in a module whose place is on a single line."""
    lines = source.splitlines()
    for node in _inside_functions(ast.parse(source)):
        for kind, place, after in _changes(node, source):
            before = ast.get_source_segment(source, place)
            if before is None or "\n" in before or before == after:
                continue
            yield Mutant(
                file=file,
                line=place.lineno,
                column=len(lines[place.lineno - 1].encode()[: place.col_offset].decode()),
                kind=kind,
                before=before,
                after=after,
                text=lines[place.lineno - 1],
            )


def _inside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """What is executed inside functions: no signatures, annotations or docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nested = [child for child in node.body if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))]
            for statement in nested:
                yield from ast.walk(statement)


def _changes(node: ast.AST, source: str) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Kinds of changes, with the node whose text is replaced by another."""
    text = ast.get_source_segment(source, node) or ""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            ends = [ast.get_source_segment(source, end) for end in (left, right)]
            yield "comparison turned", node, f"({ends[0]}) {_TURNED[type(operator)]} ({ends[1]})"
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield "off by one", node, str(value + 1)
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            yield "dropped call", node, "pass"
        case ast.Call(args=[first, second, *_]) if not any(isinstance(a, ast.Starred) for a in (first, second)):
            one, two = (ast.get_source_segment(source, a) or "" for a in (first, second))
            yield "swapped arguments", node, text.replace(f"{one}, {two}", f"{two}, {one}", 1)
        case ast.Await(value=value):
            yield "removed fence or await", node, ast.get_source_segment(source, value) or ""
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as operator, right=right):
            ends = [ast.get_source_segment(source, end) for end in (left, right)]
            yield "wrong unit", node, f"({ends[0]}) {'/' if isinstance(operator, ast.Mult) else '*'} ({ends[1]})"
        case ast.BinOp(left=left, op=ast.LShift() | ast.RShift(), right=ast.Constant(value=20 | 30 as by)):
            yield "wrong unit", node, text[: -len(str(by))] + str(by - 10)
        case ast.With(items=[ast.withitem(context_expr=fence, optional_vars=None)]):
            yield "removed fence or await", fence, "__import__('contextlib').nullcontext()"
        case _:
            return


def draw(root: Path, *, seed: int, count: int) -> list[Mutant]:
    """As many of each kind, on lines at random over the whole package but what serves tests alone."""
    by_kind: dict[str, dict[tuple[str, int], list[Mutant]]] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        for mutant in () if file.startswith(f"{PACKAGE}/testing/") else mutants_of(path.read_text(), file):
            by_kind.setdefault(mutant.kind, {}).setdefault((file, mutant.line), []).append(mutant)
    chosen, kinds = random.Random(seed), sorted(by_kind)
    shares = {kind: count // len(kinds) + (n < count % len(kinds)) for n, kind in enumerate(kinds)}
    return [
        chosen.choice(lines[place])
        for kind, lines in sorted(by_kind.items())
        for place in chosen.sample(sorted(lines), min(shares[kind], len(lines)))
    ]


def mutated(source: str, mutant: Mutant) -> str | None:
    """The module with the mutant in it; None where its line is no longer there."""
    lines = source.splitlines(keepends=True)
    same = [number for number, line in enumerate(lines) if line.rstrip("\n") == mutant.text]
    if not same:
        return None
    number = min(same, key=lambda n: abs(n - mutant.line + 1))
    line, start = lines[number], mutant.column
    assert line[start:].startswith(mutant.before)
    lines[number] = line[:start] + mutant.after + line[start + len(mutant.before) :]
    return "".join(lines)


def reaching(data: CoverageData, mutant: Mutant) -> set[str]:
    """The functions of tests that reach the mutant's line, such as `tests/core/test_plan.py::test_it`."""
    (measured,) = [file for file in data.measured_files() if file.endswith(f"/{mutant.file}")] or [""]
    contexts = data.contexts_by_lineno(measured).get(mutant.line, ()) if measured else ()
    tests = {context.partition("|")[0].partition("@")[0] for context in contexts}  # without the group of `loadgroup`
    return {test.partition("[")[0] for test in tests if test}


def durations(files: Iterable[Path]) -> dict[str, float]:
    """The processor seconds of the slowest case of each function, as the tests have recorded them."""
    slowest: dict[str, float] = {}
    for file in files:
        for test, seconds in json.loads(file.read_text()).items():
            function = test.partition("[")[0]
            slowest[function] = max(slowest.get(function, 0.0), seconds)
    return slowest


def functions_in(root: Path, file: str) -> set[str]:
    """The tests of a file, methods of classes included."""
    path = root / file
    if not path.exists():
        return set()
    found = set()
    for node in ast.parse(path.read_text()).body:
        within = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{file}::{node.name}::" if isinstance(node, ast.ClassDef) else f"{file}::"
        found |= {f"{prefix}{f.name}" for f in within if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")}
    return found


def run_tests(root: Path, tests: list[str], *, limit_s: float) -> str | None:
    """The first test that fails, in this order; None if none does."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as named:
        named.write("\n".join(tests))
        named.flush()
        words = ["-x", "-q", "-m", "not long", "-p", "no:cacheprovider", "--timeout=120", f"@{named.name}"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *words], cwd=root, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return "all together: no end"
    if done.returncode in (0, 5):
        return None
    if "ERROR: not found:" in done.stderr:
        raise RuntimeError(f"the tree has other tests than the one that was measured: {done.stderr[-500:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0][:200] if failed else (done.stdout + done.stderr)[-200:]


def find(root: Path, mutant: Mutant, tests: list[str], seconds: Mapping[str, float]) -> dict[str, object]:
    """Plant the mutant, run the tests and take it back; what found it."""
    path = root / mutant.file
    source = path.read_text()
    changed = mutated(source, mutant)
    if changed is None:
        return {**asdict(mutant), "found": None, "why": "the line is gone"}
    ordered = sorted(tests, key=lambda test: (seconds.get(test, 0.0), test))
    quick = [test for test in ordered if seconds.get(test, 0.0) < _QUICK_S]
    began_s, by = time.monotonic(), None
    path.write_text(changed)
    try:
        for part in (quick, ordered[len(quick) :]):
            by = by or (run_tests(root, part, limit_s=_WHOLE_S) if part else None)
    finally:
        path.write_text(source)
    took_s = time.monotonic() - began_s
    return {**asdict(mutant), "found": by, "tests": len(ordered), "took_s": round(took_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    drawing = verbs.add_parser("draw")
    drawing.add_argument("--seed", type=int, default=1)
    drawing.add_argument("--count", type=int, default=60)
    running = verbs.add_parser("run")
    running.add_argument("mutants", type=Path)
    running.add_argument("--coverage", type=Path, required=True, help="data with contexts")
    running.add_argument("--durations", type=Path, nargs="*", default=[], help="JSON: processor seconds of tests")
    running.add_argument(
        "--then",
        type=Path,
        help="the tree that was measured, where it is not this one: tests that "
        "this one has in the same files, and that one has not, are run too",
    )
    running.add_argument("--share", default="0/1")
    for verb in (drawing, running):
        verb.add_argument("--output", type=Path, required=True)
    options, root = parser.parse_args(), Path.cwd()
    if options.verb == "draw":
        drawn = draw(root, seed=options.seed, count=options.count)
        options.output.write_text(json.dumps([asdict(mutant) for mutant in drawn], indent=1))
        return
    data = CoverageData(str(options.coverage))
    data.read()
    seconds = durations(options.durations)
    part, parts = map(int, options.share.split("/"))
    found = []
    for mutant in [Mutant(**each) for each in json.loads(options.mutants.read_text())][part::parts]:
        tests = reaching(data, mutant)
        if options.then is not None:
            files = {test.partition("::")[0] for test in tests}
            here = {file: functions_in(root, file) for file in files}
            new = {test for file in files for test in here[file] - functions_in(options.then, file)}
            tests = {test for test in tests if test in here[test.partition("::")[0]]} | new
        found.append(find(root, mutant, sorted(tests), seconds))
        options.output.write_text(json.dumps(found, indent=1))
        print(json.dumps({key: found[-1].get(key) for key in ("file", "line", "kind", "found", "took_s")}), flush=True)


if __name__ == "__main__":
    main()
