"""What is printed of training around a server, and of a model of losses."""

from typing import Any

import pytest

from funcpipe.core.loss_model import WeightedLoss
from funcpipe.core.provision import CostItem, Provision, Rented
from funcpipe.neighbours.parameter_server.training import ServerResult
from funcpipe.neighbours.parameter_server.worker_group import PushRecord, Updates
from funcpipe.show import jobs
from funcpipe.show.describe import Description

WAY = Provision(
    way="lambdadnn",
    rented=(Rented(name="1024MB", count=2),),
    seconds=30.0,
    start_s=10.0,
    iterations=40.0,
    cost=(CostItem(name="functions", usd=0.25),),
    binds="nothing",
    why="it is the cheapest",
)


def shown(found: Description) -> tuple[str, ...]:
    """The rows of its tables, and its facts."""
    return (*(" ".join(row) for table in found.tables for row in table.rows), *(text for _, text in found.facts))


def result(updates: Updates, **fields: Any) -> ServerResult:
    bill = (CostItem(name="w0", usd=0.5), CostItem(name="server", usd=0.25))
    return ServerResult(run="one", updates=updates, seconds=25.0, state={}, bill=bill, **fields)


def test_synchronous_steps_are_shown_by_worker_beside_what_was_predicted() -> None:
    computed = ({"w0": 4, "w1": 4}, {"w0": 8})
    done = result(Updates.BSP, losses=(2.0, 1.5), step_s=(0.4, 0.8), computed_by=computed, lost=("w1: killed",))
    lines = shown(jobs.server_result(done, WAY, "model.pt"))
    assert {"w0 12 - 0.50", "w1 4 - -"} <= set(lines)
    assert {"loss 2.0000 -> 1.5000 in 2 updates", "w1: killed", "the model is in model.pt"} <= set(lines)
    assert "a step took 0.6 s, 0.5 s predicted" in lines
    assert "took 25 s and $0.75 here; 30 s and $0.25 predicted for what lambdadnn rents" in lines


def test_asynchronous_updates_are_shown_with_how_stale_they_were() -> None:
    pushes = (("w0", 2.0, 0), ("w1", 1.75, 1), ("w0", 1.25, 3))
    records = tuple(
        PushRecord(worker=worker, samples=4, loss=loss, staleness=stale, iterations=1.0)
        for worker, loss, stale in pushes
    )
    lines = shown(jobs.server_result(result(Updates.ASP, pushes=records), WAY, "model.pt"))
    assert {"w0 8 1.50 0.50", "w1 4 1.00 -", "loss 2.0000 -> 1.2500 in 3 updates"} <= set(lines)
    assert not [line for line in lines if line.startswith("a step took")]


def test_a_run_that_was_ended_before_its_first_update_shows_none() -> None:
    found = jobs.server_result(result(Updates.BSP), WAY, "model.pt")
    assert found.title == f"run one: {WAY.text}, {Updates.BSP.value}"
    assert not [line for line in shown(found) if "updates" in line or "a step took" in line]


@pytest.mark.parametrize("coefficients", [4, 5])
def test_coefficients_of_a_loss_are_shown_with_their_deviations(coefficients: int) -> None:
    covariance = tuple(tuple(0.04 if i == j else 0.0 for j in range(coefficients)) for i in range(coefficients))
    found = WeightedLoss(gamma1=2.0, gamma2=0.0, gamma3=9.0, gamma5=0.5, covariance=covariance, residual=0.1)
    values, duration, written = shown(jobs.loss_model(found, "loss.json", 1.5, 64.0))
    assert values.startswith("γ1 2 ± 0.2, γ2 0 ± 0.2, γ3 9 ± 0.2, γ5 0.5 ± 0.2")
    assert ("γ4 1 ± 0.2" in values) == (coefficients == 5)
    assert values.endswith("losses lie 0.1 around it")
    assert duration.startswith("a loss of 1.5 takes 7 steps ± ")
    assert written == "written to loss.json"


def test_a_loss_that_is_never_reached_is_said() -> None:
    found = WeightedLoss(gamma1=2.0, gamma2=0.0, gamma3=9.0, gamma5=0.5, covariance=((0.0,) * 4,) * 4)
    assert "0.5" in shown(jobs.loss_model(found, "loss.json", 0.25, 64.0))[1]
