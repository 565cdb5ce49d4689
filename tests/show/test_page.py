"""What the page says; how it looks in a browser is in test_browser."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from funcpipe.core import RequestCounts, RunRecord, StoreBill
from funcpipe.core.texts import number_text
from funcpipe.errors import InputError
from funcpipe.show.describe import Table
from funcpipe.show.material import Material, merged
from funcpipe.show.page import page
from funcpipe.show.page_parts import table
from funcpipe.show.page_run import bill_section, marks, throughput
from tests.e2e import small
from tests.show.large import material

WHOLE = material()


class _Ids(HTMLParser):
    """The sections' names, and all addresses that the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "section":
            self.sections.append(given["id"] or "")
        addresses = [given.get("src"), given.get("href") if tag == "link" else None]
        self.loaded += [address for address in addresses if address]


def parsed(text: str) -> _Ids:
    found = _Ids()
    found.feed(text)
    return found


def test_all_sections_and_nothing_from_the_network() -> None:
    found = parsed(page(WHOLE))
    assert found.sections == ["plan", "progress", "timeline", "spent", "bill", "environment"]
    assert found.loaded == ["data:,"]


@pytest.mark.parametrize(
    ("known", "sections"),
    [
        (Material(plan=WHOLE.plan), ["plan", "bill", "environment"]),
        (Material(predicted=WHOLE.predicted), ["timeline", "spent", "environment"]),
        (Material(observed=WHOLE.observed), ["progress", "timeline", "spent", "environment"]),
        (Material(finished=WHOLE.finished), ["progress", "spent", "bill", "environment"]),
        (
            Material(plan=WHOLE.plan, profile=WHOLE.profile, spec=WHOLE.spec),
            ["plan", "timeline", "spent", "bill", "environment"],
        ),
    ],
)
def test_a_page_has_the_sections_for_which_there_is_something(known: Material, sections: list[str]) -> None:
    assert parsed(page(known)).sections == sections


def test_nothing_to_show_and_too_much() -> None:
    with pytest.raises(InputError, match="nothing to report on"):
        page(Material(spec=WHOLE.spec))
    with pytest.raises(InputError, match="two of: plan; name each once"):
        merged(Material(plan=WHOLE.plan), WHOLE)


def test_names_cannot_break_out_of_the_page() -> None:
    assert WHOLE.plan is not None
    text = page(Material(plan=replace(WHOLE.plan, model="</script><script>alert(1)</script>")))
    assert "<script>alert(1)" not in text
    assert "&lt;b&gt;" in table(Table.of("t", ("a",), [("<b>",)]))


def test_restarts_are_marked_at_their_step() -> None:
    (mark,) = marks(WHOLE.observed, WHOLE.finished)
    assert (mark.worker, mark.step, mark.why) == ("s0.r1", 1, "started again: the attempt before left no report")


def test_a_trace_alone_tells_where_an_attempt_began_only_if_it_has_the_step_before() -> None:
    """A trace has the last steps of an attempt, which may have begun long before them."""
    assert WHOLE.observed is not None
    (seen,) = marks(WHOLE.observed, None)
    assert (seen.worker, seen.step, seen.why) == ("s0.r1", 1, "started again")
    later = [event for event in WHOLE.observed.events if event.step > 1 or (event.stage, event.replica) != (0, 1)]
    (unknown,) = marks(replace(WHOLE.observed, events=tuple(later)), None)
    assert (unknown.worker, unknown.step) == ("s0.r1", None)
    assert "Restarts and hand-overs" in page(Material(observed=replace(WHOLE.observed, events=tuple(later))))


def test_a_short_batch_counts_with_its_own_samples() -> None:
    """Steps that take as long have a throughput in proportion to their samples."""
    assert WHOLE.observed is not None
    unit, rates = throughput(replace(WHOLE.observed, samples={0: 16, 1: 16, 2: 4}))
    assert unit == "samples/s"
    assert rates[1] == pytest.approx(4 * rates[2])
    unit, rates = throughput(replace(WHOLE.observed, samples={}))
    assert unit == "steps/s"
    assert rates[1] == pytest.approx(rates[2])


def test_the_bill_of_a_run_that_was_resumed_stands_beside_the_estimate_of_its_own_steps() -> None:
    record = RunRecord(
        run="r",
        generation=1,
        plan=WHOLE.plan or small.plan(1, 1),
        platform="local:",
        storage="memory://",
        samples=16,
        epochs=3,
        steps=3,
        first_step=2,
        seed=0,
        shuffle=True,
        clip_grad_norm=None,
    )
    assert WHOLE.finished is not None
    assert WHOLE.estimate is not None
    finished = replace(WHOLE.finished, bill=replace(WHOLE.finished.bill, earlier_usd=0.25))
    section = bill_section(replace(WHOLE, record=record, finished=finished))
    assert section is not None
    text = "".join(map(str, section.parts))
    assert f'<th scope="row">puts</th><td>{WHOLE.estimate.puts:,}</td>' in text
    assert "1 step on aws-lambda" in text
    assert "Before it was resumed, the run had cost $0.25 for 2 steps." in text


def test_the_bill_stands_beside_the_estimate_of_as_many_steps() -> None:
    section = bill_section(WHOLE)
    assert section is not None
    assert WHOLE.estimate is not None
    rows = dict(re.findall(r'<th scope="row">(puts|gets)</th><td>([\d,]+)</td>', str(section.parts[0])))
    assert rows == {"puts": f"{3 * WHOLE.estimate.puts:,}", "gets": f"{3 * WHOLE.estimate.gets:,}"}


def test_each_kind_of_object_stands_with_its_store_beside_its_estimate() -> None:
    assert WHOLE.estimate is not None
    assert WHOLE.finished is not None
    asked = RequestCounts(puts=1234, lists=5, gets=6, sent_bytes=20 << 20, received_bytes=30 << 20)
    item = StoreBill(kind="messages", store="near", requests=asked, request_usd=0.25, transfer_usd=0.5, hours_usd=0.75)
    bill = replace(WHOLE.finished.bill, stores=(item, replace(item, kind="default")), hours_usd=0.75)
    section = bill_section(replace(WHOLE, finished=replace(WHOLE.finished, bill=bill)))
    assert section is not None
    whole, items, *_ = map(str, section.parts)
    (expected,) = [3 * of_kind.cost_usd for of_kind in WHOLE.estimate.stores if of_kind.kind == "messages"]
    numbers = ["near", "1234", "5", "6", "0.250000", "20.00", "30.00", "0.500000", "0.750000", "1.500000"]
    for kind, beside in {
        "messages": [number_text(expected, 6), f"{1.5 / expected:.2f}"],
        "all else": ["-", "-"],
    }.items():
        cells = "".join(f"<td>{cell}</td>" for cell in [*numbers, *beside])
        assert f'<th scope="row">{kind}</th>{cells}' in items
    assert '<th scope="row">hours of stores</th><td>$0</td><td>$0.75</td>' in whole


def test_what_the_client_downloaded_is_an_item_that_the_estimate_lacks() -> None:
    assert WHOLE.finished is not None
    bill = replace(WHOLE.finished.bill, traffic_usd=0.75)
    section = bill_section(replace(WHOLE, finished=replace(WHOLE.finished, bill=bill)))
    assert section is not None
    text = "".join(map(str, section.parts))
    assert '<th scope="row">downloads by the client</th><td></td><td>$0.75</td><td></td>' in text
    assert "what the client downloads is not" in text


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    with pytest.raises(InputError, match=r"funcpipe-torch\[report\]"):
        page(WHOLE)
