"""The options and settings of the verb optimize."""

from funcpipe.cli.options import Choice, group, not_negative, option, positive, setting, whole
from funcpipe.core import SYNC_WIRES, Coupled, ScheduleKind, Stores, Sync, TrainingSpec, Wire
from funcpipe.errors import InputError


def _degrees(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--replicas takes whole numbers separated by commas, got {text!r}") from None


def _stores(text: str) -> Stores:
    """The stores that plans may use: a word for all kinds, or the store of some of them."""
    if "=" not in text:
        return Stores.of(text)
    pairs = [part.partition("=") for part in text.split(",")]
    return Stores.of({kind.strip(): name.strip() for kind, _, name in pairs})


def _sync_every(text: str) -> int | str:
    """A number of steps; another word is for `TrainingSpec` to judge."""
    return int(text) if text.isascii() and text.removeprefix("-").isdigit() else text


GOAL = group(
    "goal: The cheapest iteration, unless one of the first three says otherwise.",
    option("--time-value USD_PER_HOUR", "what saving an hour is worth", not_negative, 0.0, one_of="goal"),
    option("--deadline SECONDS", "the cheapest job that ends within this time", positive, one_of="goal"),
    option("--max-usd USD", "the fastest job that costs no more than this", positive, to="budget", one_of="goal"),
    option("--steps N", "how many steps that job has", whole(), 1, to="iterations"),
)

TRAINING = group(
    "training",
    option("--optimizer", "the optimiser, which decides what state there is", of=TrainingSpec),
    option(
        "--numerics",
        "may what would travel in fp32 travel in bf16, or in int8, where that is better; plan.wire and its like say "
        "more",
        of=TrainingSpec,
    ),
    setting("plan.wire", "number format in which activations travel", of=TrainingSpec),
    setting("plan.wire-back", "number format of their gradients", Choice(Wire, none="same"), "same"),
    setting("plan.wire-sync", "number format in which replicas sum gradients", Choice(SYNC_WIRES), of=TrainingSpec),
    setting("plan.recompute", "may stages recompute to save memory", of=TrainingSpec),
    setting("plan.schedule", "order of the micro-batches", Choice(ScheduleKind, none="auto"), "auto"),
    setting("plan.sync", "how replicas sum their gradients", Choice(Sync, none="auto"), "auto"),
    setting(
        "plan.sync-every N|auto|end",
        "let replicas train alone, and meet after N steps; `end` for once, at the end of a run; `auto` chooses among "
        "those that plan.sync-every-at-most admits",
        _sync_every,
        "1",
    ),
    setting("plan.sync-every-at-most N", "with plan.sync-every=auto: no more steps than this", whole()),
    setting("plan.outer-lr RATE", "how far replicas go to their mean when they meet", positive, of=TrainingSpec),
    setting("plan.outer-momentum MU", "the Nesterov momentum of that", not_negative, of=TrainingSpec),
    setting(
        "plan.sync-fragments F",
        "let the parameters of each stage meet in F parts, each N/F steps after the one before",
        whole(),
        of=TrainingSpec,
    ),
    setting(
        "plan.sync-delay K",
        "let what replicas meet on reach them K steps later, and travel while they train",
        whole(0),
        of=TrainingSpec,
    ),
    setting("plan.shard-optimizer", "divide the optimiser's state among replicas (ZeRO stage 1)"),
    setting(
        "plan.stores KIND=STORE",
        "which stores of the platform the plan may use: `default` alone, `auto` for whichever are best, or by "
        "kind, such as messages=express,sums=auto",
        _stores,
        "default",
    ),
    setting("plan.averaged", "leave room for an average of the parameters (training.ema)"),
    setting(
        "plan.coupled",
        "`cache` plans for a loss that is computed once for the whole global batch, from the outputs of all "
        "micro-batches (training.coupled=cache); the others do not change a plan",
        Coupled,
    ),
    option("--replicas N,N", "degrees of data parallelism to consider (default: all that divide the batch)", _degrees),
    option("--global-batch N", "samples per iteration, over all replicas", whole(), needed=True),
)
"""The options of training; `auto` leaves the choice to the planner."""

PINS = group(
    "pins: Decisions that the plan must follow.",
    setting("plan.cut LAYER ...", "begin a stage with this layer", to="cuts"),
    setting("plan.together LAYER,LAYER ...", "keep these layers, and all between them, in one stage"),
    setting("plan.size LAYER=SIZE ...", "run this layer on functions of this size"),
    setting("plan.memory MB", "give every function this much memory", whole(), to="memory_mb"),
    option("--max-memory MB", "give no function more memory than this", whole(), to="max_memory_mb"),
    option("--max-functions N", "run no more functions than this at once", whole()),
)

SEARCH = group(
    "search",
    setting(
        "plan.solver NAME",
        "`exact` for the built-in search with proof, or a solver: gurobi, scip, highs, "
        "or mip for the first of these that is installed; `paper` for the paper's own program; `auto` is exact",
        None,
        "auto",
    ),
    setting("plan.time-limit SECONDS", "stop searching after this time", positive),
    setting(
        "plan.simulate N",
        "simulate an iteration of the best N plans that differ in cuts, replicas or schedule, and take the best",
        whole(),
    ),
    setting(
        "plan.policy NAME",
        "plan by the rules of another system, such as pipedream or lambdaml; see docs/planning.md",
        None,
        "funcpipe",
    ),
    option("--pareto", "print every plan that no other beats in both time and money", key=""),
    option("--figure FILE", "with --pareto: draw those plans (needs matplotlib)", key="", writes=""),
    option(
        "--what-if NAME=VALUE ...",
        "compare today's plan with the best one after a change, and write that one. May be repeated. "
        "bandwidth=2x, price=0.5x, request_price=0x, latency_s=0.01, contention=1.2, shared_bytes_s=1e9, "
        "sizes=1024MB,2048MB or profile=FILE",
        key="",
    ),
)
