"""What functions with an accelerator do not train yet: refused before anything runs."""

from collections.abc import Sequence

from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.stages import PreparedStage
from funcpipe.core import Coupled, PlatformSpec
from funcpipe.errors import PlanError


def check_accelerated(job: Job, stages: Sequence[PreparedStage], functions: PlatformSpec) -> None:
    """Raise PlanError for a `job` with a stage whose functions have an accelerator, if that cannot train it as one
    process on such a device does; its `stages` are in the order of the plan.
    """
    plan, recipe = job.plan, job.recipe
    accelerated = [number for number, stage in enumerate(plan.stages) if functions.accelerates(stage.size)]
    if not accelerated:
        return
    refused = {
        f"precision={recipe.precision.value!r}, only 'fp32' and 'bf16'": recipe.precision.scales_loss,
        "replicas that train alone (sync_every)": plan.trains_locally,
        "coupled='cache'": recipe.coupled is Coupled.CACHE,
        "an average of the parameters": recipe.average is not None,
        "teachers": bool(recipe.teachers),
        "modules that keep more than tensors between their calls": any(
            stages[n].module.carried.blocks for n in accelerated
        ),
    }
    for what, is_so in refused.items():
        if is_so:
            raise PlanError(
                f"functions with a GPU do not train {what} yet, and stage {accelerated[0]} has the size "
                f"{plan.stages[accelerated[0]].size}; train without, or plan with sizes that have no GPU"
            )
