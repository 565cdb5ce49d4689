"""The page that shows all results: every figure, what was found, and the numbers, in one file without a network."""

import html
from collections.abc import Sequence

from experiments.paper.common import PAPER_CLAIM, Answer, Row

_STYLE = """
:root { color-scheme: light dark; --quiet: #767676; --line: #9994; --card: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 3rem; }
nav a, .how { font-size: .9rem; }
.how { color: var(--quiet); }
.tag { border: 1px solid; border-radius: 1em; padding: .05em .6em; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { width: 100%; min-width: 36rem; height: auto; }
details { background: var(--card); padding: .3rem .8rem; border-radius: .4rem; }
.scroll { overflow-x: auto; max-height: 30rem; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .15rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
"""


def page(answers: Sequence[Answer], took_s: float, machine: str) -> str:
    """The page; `machine` says on what all was measured."""
    links = "".join(f'<li><a href="#{found.name}">{html.escape(found.question)}</a></li>' for found in answers)
    sections = "".join(map(section, answers))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>FuncPipe: the evaluation</title><style>{_STYLE}</style></head><body>"
        "<h1>FuncPipe: the evaluation</h1>"
        f"<p>{len(answers)} questions, answered in {took_s / 60:.0f} minutes on {html.escape(machine)}. Each says "
        "whether its numbers are executed or simulated, and on what. “FuncPipe (paper)” is the paper's own system: "
        "GPipe, its pipelined scatter-reduce, 32-bit tensors, no recomputation. “funcpipe” chooses schedule, "
        f"recomputation and synchronisation with the plan. {html.escape(PAPER_CLAIM[0].upper() + PAPER_CLAIM[1:])}.</p>"
        f"<nav><ol>{links}</ol></nav><main>{sections}</main></body></html>\n"
    )


def section(found: Answer) -> str:
    """One question: how it was answered, what was found, the figure, the numbers."""
    sentences = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in found.findings)
    label = html.escape(found.question, quote=True)
    return (
        f'<section id="{found.name}"><h2>{html.escape(found.question)}</h2>'
        f'<p class="how"><span class="tag">{html.escape(found.how)}</span> {html.escape(found.on)}; '
        f"<code>python -m experiments.paper.{found.name}</code>, {found.took_s:.0f} s</p>"
        f'<ul>{sentences}</ul><figure role="img" aria-label="{label}">{found.svg}</figure>'
        f"<details><summary>{len(found.rows)} rows of numbers</summary>{table(found.rows)}</details></section>"
    )


def table(rows: Sequence[Row]) -> str:
    """The rows with all columns that any of them has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(row.get(name))}</td>' for name in columns)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: object) -> str:
    match value:
        case None:
            return "–"
        case float():
            return f"{value:.4g}"
        case dict():
            return html.escape(", ".join(f"{name}: {_cell(item)}" for name, item in value.items()))
        case list() | tuple():
            shown = " ".join(_cell(item) for item in value[:4])
            return shown + (f" … ({len(value)})" if len(value) > 4 else "")
        case _:
            return html.escape(str(value))
