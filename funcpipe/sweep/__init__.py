"""Sweeps: many trainings side by side, each with the values that Optuna suggests for it, and one study of them all.

`Sweep` (`sweep.py`) is what users see. `study.py` is Optuna's study with its journal in the sweep's storage;
`candidates.py` makes runs of what the user's factory returns, which share trace, plan and code where they differ in
numbers only; `trial_run.py` trains one of them; `budget.py` says how many may start, and predicts what all will take.
"""

from funcpipe.core.distribution import needed_from

with needed_from("sweep"):
    import optuna  # noqa: F401 - what all of it is made with
