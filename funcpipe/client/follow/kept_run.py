"""The material for a report of a run that was kept."""

from funcpipe.client.follow.results import load_trace
from funcpipe.client.prepare.prices import prices_at
from funcpipe.core import FinishedRun, PlatformSpec
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import planned_spec
from funcpipe.report.html.material import Material
from funcpipe.runstate.finished import find_finished
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.keyring import signed
from funcpipe.runstate.keys import Keys


def load_kept(storage: Storage, run: str, spec: PlatformSpec | None = None) -> Material:
    """The plan, trace, losses and bill of the run; of one that still trains, what it has written so far.

    Prices are those of `spec`, or else of the platform that the plan was made for. Raises RunUnknown, and InvalidValue
    where that platform is none of the catalogue.
    """
    own = signed(storage)
    record = newest_record(own, run)
    keys = Keys.of(record)
    finished: FinishedRun | None = find_finished(own, keys)
    prices = spec or prices_at(record.platform, planned_spec(record.plan), given=False)
    trace = load_trace(own, keys, record.plan, prices)
    return Material(plan=record.plan, record=record, finished=finished, observed=trace if trace.events else None)
