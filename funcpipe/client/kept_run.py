"""What is kept of a run that has finished, for a report of it."""


from funcpipe.client.results import load_trace
from funcpipe.core import FinishedRun
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec
from funcpipe.report.html.material import Material
from funcpipe.runstate.finished import find_finished
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.keyring import signed
from funcpipe.runstate.keys import Keys


def load_kept(storage: Storage, run: str) -> Material:
    """The plan, trace, losses and bill of the run; of one that still trains, what it has written so far.

    Raises RunUnknown if there is no such run, and if it has written nothing yet.
    """
    own = signed(storage)
    record = newest_record(own, run)
    keys = Keys.of(record)
    finished: FinishedRun | None = find_finished(own, keys)
    trace = load_trace(own, keys, record.plan, load_spec(record.plan.platform))
    return Material(plan=record.plan, record=record, finished=finished, observed=trace if trace.events else None)
