"""From a profile, a platform and what is wanted to a plan: where to cut, how much memory, how many replicas.

Here is what can be asked of the planner by name, and how many layers it plans with; loading it takes nothing but the
standard library.

A *solver* finds the best plan (`plan.solver`); a *policy* is another way to choose a plan (`plan.policy`), to compare
with.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from funcpipe.core import Plan
from funcpipe.core.distribution import require_full_name
from funcpipe.errors import InvalidValue

if TYPE_CHECKING:
    from funcpipe.partitioner.problem.problem import Problem

require_full_name(__name__)

PROFILED_LAYERS = 30
"""Profiling merges a model's layers to this many unless asked otherwise: all the cuts that a plan of a few stages can
use, and a profile that the exact search plans within a second or two.
"""

PLANNED_LAYERS = 40
"""Planning merges a profile with more layers, asked for or written by hand, to this many: as many as the
exact search still plans in seconds for any graph of layers.
"""

_SOLVERS = {
    "auto": "search.exact:exact",
    "exact": "search.exact:exact",
    "gurobi": "mip:gurobi",
    "scip": "mip:scip",
    "highs": "mip:highs",
    "mip": "mip:mip",
    "paper": "mip:paper",
}
_POLICIES = {
    "exhaustive": "search.exhaustive:exhaustive",
    "lambdaml": "baselines:lambdaml",
    "lambdaml-ga": "baselines:lambdaml_ga",
    "hybridps": "baselines:hybridps",
    "hybridps-ga": "baselines:hybridps_ga",
    "tpdmp": "baselines:tpdmp",
    "pipedream": "baselines:pipedream",
    "bayes": "baselines:bayes",
    "uniform": "baselines:uniform",
}


class Policy(Protocol):
    """A way to choose a plan."""

    def __call__(self, problem: "Problem", *, time_limit_s: float | None = None) -> Plan:
        """The plan chosen; raises Infeasible."""


def policies() -> tuple[str, ...]:
    """The names that `optimize` takes as policy."""
    return ("funcpipe", *_POLICIES)


def solvers() -> tuple[str, ...]:
    """The names that `optimize` takes as solver."""
    return tuple(_SOLVERS)


def find_policy(policy: str, solver: str = "auto") -> Policy:
    """The policy of that name; for 'funcpipe', the best plan by `solver`. Raises InvalidValue."""
    if policy not in policies():
        raise InvalidValue("policy", policy, f"must be one of {', '.join(policies())}")
    if solver not in solvers():
        raise InvalidValue("solver", solver, f"must be one of {', '.join(solvers())}")
    module, _, name = (_SOLVERS[solver] if policy == "funcpipe" else _POLICIES[policy]).partition(":")
    return cast(Policy, getattr(import_module(f"funcpipe.partitioner.{module}"), name))
