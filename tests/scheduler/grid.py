"""A schedule as text: a row for each stage, a column for each unit of time.

Times are those of a chain whose forwards and backwards all take one unit and whose transfers take none::

    stage 0   F0 F1 F2       B0 F3 B1    B2    B3
    stage 1      F0 F1    B0 F2 B1 F3 B2    B3
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3
"""

import re
from collections.abc import Sequence

from funcpipe.errors import InvalidValue, PlanError
from funcpipe.scheduler.pipeline import Action

Orders = Sequence[Sequence[Action]]
"""For each stage the order of its computation."""


def to_grid(orders: Orders) -> str:
    """`orders` as text. Raises PlanError when the stages would wait for each other for ever."""
    starts = _starts(orders)
    width = 1 + max((len(str(action)) for order in orders for action in order), default=0)
    rows = []
    for stage, order in enumerate(orders):
        cells = [""] * (1 + max((starts[stage, action] for action in order), default=-1))
        for action in order:
            cells[starts[stage, action]] = str(action)
        rows.append(f"stage {stage:<4}" + "".join(cell.ljust(width) for cell in cells))
    return "\n".join(row.rstrip() for row in rows)


def from_grid(text: str) -> tuple[tuple[Action, ...], ...]:
    """The orders that `to_grid` printed; how far apart the actions stand does not matter."""
    orders = []
    for number, line in enumerate(text.strip().splitlines()):
        match = re.fullmatch(r"\s*stage (\d+)(.*)", line)
        if match is None or int(match[1]) != number:
            raise InvalidValue("schedule", line, f"must begin with 'stage {number}'")
        orders.append(tuple(parse_action(word) for word in match[2].split()))
    return tuple(orders)


def parse_action(text: str) -> Action:
    """The action that prints as `text`."""
    match = re.fullmatch(r"([FB])(\d+)", text, re.ASCII)
    if match is None:
        raise InvalidValue("action", text, "must read like F3 or B3")
    return Action(match[1] == "B", int(match[2]))


def _starts(orders: Orders) -> dict[tuple[int, Action], int]:
    """The unit of time in which each stage takes each of its actions."""
    starts: dict[tuple[int, Action], int] = {}
    heads, free = [0] * len(orders), [0] * len(orders)
    waiting = list(range(len(orders)))
    while waiting:
        stage = waiting.pop()
        while heads[stage] < len(orders[stage]):
            action = orders[stage][heads[stage]]
            source = _source(stage, action, len(orders))
            if source is not None and source not in starts:
                break
            ready = 0 if source is None else starts[source] + 1
            starts[stage, action] = max(free[stage], ready)
            free[stage] = starts[stage, action] + 1
            heads[stage] += 1
            waiting += [neighbour for neighbour in (stage - 1, stage + 1) if 0 <= neighbour < len(orders)]
    stuck = [
        f"{order[head]} of stage {s}"
        for s, (order, head) in enumerate(zip(orders, heads, strict=True))
        if head < len(order)
    ]
    if stuck:
        raise PlanError(f"the schedule cannot end; what waits for ever: {', '.join(stuck)}")
    return starts


def _source(stage: int, action: Action, stages: int) -> tuple[int, Action] | None:
    """What brings an action its input: the stage before going forward, the stage after going back."""
    if action.backward:
        return (stage, Action(False, action.micro_batch)) if stage == stages - 1 else (stage + 1, action)
    return None if stage == 0 else (stage - 1, action)
