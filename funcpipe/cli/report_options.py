"""The options of report and compare."""

from typing import Any

from funcpipe.cli.options import add_platform, add_verb


def add_report(verbs: Any) -> None:
    """`funcpipe report`."""
    verb = add_verb(
        verbs,
        "report",
        "show a plan or a run as a page, with its prediction",
        "funcpipe report observed.json predicted.json plan.json profile.json -o report.html\n"
        "  funcpipe report RUN --storage file:///tmp/runs -o report.html\n"
        "  funcpipe report observed.json --predicted predicted.json",
        module="report_verbs",
    )
    verb.add_argument(
        "files",
        nargs="+",
        metavar="RUN|FILES",
        help="traces, a plan, its profile, a platform; with --storage, first the name of a run",
    )
    verb.add_argument("--predicted", metavar="FILE", help="trace written by `funcpipe simulate`")
    verb.add_argument("--storage", metavar="URL", help="where the run keeps its objects")
    add_platform(verb.add_argument_group("platform"), default=None)
    output = verb.add_argument_group("output")
    output.add_argument("-o", "--output", metavar="FILE", help="write an HTML page (needs the extra `report`)")
    output.add_argument("--figure", metavar="FILE", help="draw both over time (needs matplotlib)")
    output.add_argument(
        "--perfetto", metavar="FILE", help="write both, one below the other, for https://ui.perfetto.dev"
    )


def add_compare(verbs: Any) -> None:
    """`funcpipe compare`."""
    verb = add_verb(
        verbs,
        "compare",
        "show plans, or traces of runs, side by side",
        "funcpipe compare plan.json other.json",
        module="report_verbs",
    )
    verb.add_argument("files", nargs="+", metavar="FILES", help="two or more plans, or two or more traces")
