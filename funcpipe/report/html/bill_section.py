"""The bill of a run, item by item, beside what was estimated."""

from funcpipe.core import Bill, Estimate
from funcpipe.core.texts import counted
from funcpipe.report.html.markup import Section, megabytes, paragraph, seconds, table, usd
from funcpipe.report.html.material import Material


def bill_section(material: Material) -> Section | None:
    """The section; None if there is neither a bill nor an estimate."""
    estimate, finished = material.estimate, material.finished
    if finished is None:
        return None if estimate is None else _estimated(estimate)
    bill, steps = finished.bill, len(finished.losses)
    if material.record is not None:  # the bill is of what the run has done since it was last started
        steps -= material.record.first_step - material.record.began_step
    rows = _rows(bill, estimate, steps)
    parts = [
        table(f"{counted(steps, 'step')} on {bill.platform}", ("item", "estimate", "bill", "bill / estimate"), rows)
    ]
    if bill.stores:
        head = ("kind", "store", "estimate", "bill", "bill / estimate", "puts", "lists", "gets", "sent", "received")
        parts.append(table("What each kind of object took of its store", head, _store_rows(bill, estimate, steps)))
    if bill.prices_note:
        parts.append(paragraph(f"{bill.prices_note[0].upper()}{bill.prices_note[1:]}.", kind="note"))
    if bill.earlier_usd:
        earlier = len(finished.losses) - steps
        note = f"Before it was resumed, the run had cost {usd(bill.earlier_usd)}"
        parts.append(paragraph(f"{note} for {counted(earlier, 'step')}." if earlier else f"{note}.", kind="note"))
    unlike = "; what the client downloads is not" if bill.traffic_usd else ""
    parts.append(
        paragraph(f"The estimate is that of an iteration, times the steps; start-up is in it as overhead{unlike}.")
    )
    return Section(name="bill", title="Bill", parts=tuple(parts))


def _rows(bill: Bill, estimate: Estimate | None, steps: int) -> list[tuple[str, ...]]:
    expected = None if estimate is None else steps * (estimate.cost_usd + estimate.overhead_usd)
    compute = None if estimate is None else steps * estimate.compute_usd
    requested = None if estimate is None else steps * estimate.request_usd
    puts, gets = (None, None) if estimate is None else (steps * estimate.puts, steps * estimate.gets)
    hours = None if estimate is None else steps * estimate.hours_usd
    overhead = "" if estimate is None else usd(steps * estimate.overhead_usd)
    return [
        _money("functions", compute, bill.compute_usd),
        _money("requests", requested, bill.request_usd),
        *([_money("hours of stores", hours, bill.hours_usd)] if bill.hours_usd or hours else []),
        *([_money("downloads by the client", None, bill.traffic_usd)] if bill.traffic_usd else []),
        ("starts and hand-overs", overhead, "in the items above", ""),
        _money("all", expected, bill.cost_usd - bill.earlier_usd),
        _count("puts", puts, bill.puts),
        _count("gets", gets, bill.gets),
        ("lists", "", f"{bill.lists:,}", ""),
        ("functions started", "", f"{bill.functions:,}", ""),
        ("function time", "", seconds(bill.function_seconds), ""),
    ]


def _store_rows(bill: Bill, estimate: Estimate | None, steps: int) -> list[tuple[str, ...]]:
    expected = {item.kind: steps * item.cost_usd for item in (() if estimate is None else estimate.stores)}
    rows = []
    for item in bill.stores:
        kind, store, asked = item.kind, item.store, item.requests
        name, *money = _money("all else" if kind == "default" else kind, expected.get(kind), item.cost_usd)
        counts = (f"{count:,}" for count in (asked.puts, asked.lists, asked.gets))
        moved = megabytes(asked.sent_bytes), megabytes(asked.received_bytes)
        rows.append((name, store, *money, *counts, *moved))
    return rows


def _money(name: str, expected: float | None, found: float) -> tuple[str, ...]:
    return name, "" if expected is None else usd(expected), usd(found), _ratio(expected, found)


def _count(name: str, expected: int | None, found: int) -> tuple[str, ...]:
    return name, "" if expected is None else f"{expected:,}", f"{found:,}", _ratio(expected, found)


def _ratio(expected: float | None, found: float) -> str:
    return f"{found / expected:.2f}" if expected else ""


def _estimated(estimate: Estimate) -> Section:
    rows = [
        ("functions", usd(estimate.compute_usd)),
        ("requests", usd(estimate.request_usd)),
        *([("hours of stores", usd(estimate.hours_usd))] if estimate.hours_usd else []),
        ("starts and hand-overs", usd(estimate.overhead_usd)),
        ("all", usd(estimate.cost_usd + estimate.overhead_usd)),
        ("puts", f"{estimate.puts:,}"),
        ("gets", f"{estimate.gets:,}"),
    ]
    return Section(name="bill", title="Bill", parts=(table("Estimate for one iteration", ("item", "estimate"), rows),))
