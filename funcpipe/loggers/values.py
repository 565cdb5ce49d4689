"""The numbers of a step that all loggers keep, under the same names."""

from funcpipe.client.follow.results import Progress


def step_values(progress: Progress) -> dict[str, float]:
    """The loss of a step, and the run's progress and cost so far; unknown values are left out."""
    values = {"loss": progress.loss, "cost_usd": progress.cost_usd, "elapsed_s": progress.elapsed_s}
    if progress.samples_per_s:
        values["samples_per_s"] = progress.samples_per_s
    if progress.learning_rate is not None:
        values["learning_rate"] = progress.learning_rate
    return values
