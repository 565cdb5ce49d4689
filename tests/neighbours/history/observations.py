"""Observations for tests."""

from typing import Any

from funcpipe.core import Observation, Quantity


def observation(**fields: Any) -> Observation:
    """An iteration of 1 s that took 2 s, unless `fields` say otherwise."""
    usual: dict[str, Any] = {
        "run": "r",
        "platform": "aws-lambda",
        "ran_on": "local",
        "size": "1024MB",
        "model": "small",
        "quantity": Quantity.ITERATION,
        "predicted_s": 1.0,
        "observed_s": 2.0,
        "at_s": 1.7e9,
    }
    return Observation(**{**usual, **fields})
