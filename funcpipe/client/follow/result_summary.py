"""The summary of a run's result in Python and in notebooks."""

from typing import TYPE_CHECKING

from funcpipe.core.bill import earlier_text
from funcpipe.core.stores import DEFAULT
from funcpipe.core.summary import Summary, curve
from funcpipe.core.texts import counted, number_text, usd_text

if TYPE_CHECKING:
    from funcpipe.client.follow.results import RunResult


def result_summary(result: "RunResult") -> Summary:
    """The losses, the cost, and the model of a run."""
    bill, losses = result.bill, result.losses
    fell = f", loss {losses[0]:.4f} -> {losses[-1]:.4f}" if losses else ""
    values = sum(tensor.numel() for tensor in result.tensors.values())
    seconds = number_text(bill.function_seconds, 1)
    facts = [
        ("cost", f"${usd_text(bill.cost_usd)} at the prices of {bill.platform}{earlier_text(bill)}"),
        ("used", f"{counted(bill.functions, 'function')} for {seconds} s, {bill.requests_text}"),
        ("model", f"{counted(len(result.tensors), 'tensor')} of {values:,} numbers: state_dict()"),
    ]
    if bill.prices_note:
        facts.append(("prices", bill.prices_note))
    if any(item.store != DEFAULT for item in bill.stores):
        items = [f"{item.kind} in {item.store} ${usd_text(item.cost_usd)}" for item in bill.stores]
        facts.append(("stores", ", ".join(items)))
    if result.validations:
        last = result.validations[-1]
        measured = ", ".join(f"{name} {value:.4f}" for name, value in last.values.items())
        facts.append(("validated", f"after step {last.step}: {measured}; the best was after step {result.best_step}"))
    if result.skipped_steps:
        facts.append(("skipped", f"{counted(len(result.skipped_steps), 'step')} whose gradients were not finite"))
    if result.callback_errors:
        facts.append(("callbacks", f"{counted(len(result.callback_errors), 'callback')} failed: callback_errors"))
    title = f"Result of run {result.run}: {counted(len(losses), 'step')}{fell}"
    return Summary(title=title, facts=tuple(facts), figure=curve(losses))
