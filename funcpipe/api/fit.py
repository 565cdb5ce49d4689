"""An ordinary module, its loss and its optimiser, with all verbs around them, and the one that does all at once."""

from collections.abc import Sequence
from typing import Any, Unpack

from funcpipe.api.fitting import Wanted
from funcpipe.api.placing import choose_among_places, clusters
from funcpipe.api.training import Training
from funcpipe.client.control.commands import resumed_by
from funcpipe.client.follow.callbacks import Callback
from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare import arguments
from funcpipe.client.prepare.prepared_run import Confirm
from funcpipe.core import FaultTolerance, PlatformSpec, RunLimits, RunSettings, Validation
from funcpipe.core.process import say
from funcpipe.core.settings import DEFAULT_FAULTS, DEFAULT_SETTINGS, NO_LIMITS, RunKeywords, settings_with
from funcpipe.platforms.catalog import LOCAL
from funcpipe.training.data_source import Data
from funcpipe.worker.deferred_compiler import CompilerDeferred


class FuncPipe(Training):
    """A module to be trained over functions. Training updates `model`.

    Args:
        model: The module, or with `weights` a function that makes it. Stages run eagerly: what torch.compile has
            wrapped is refused.
        loss_fn: Takes the module's output and the targets, and returns the mean over the samples it is given. None
            stands for a module that computes its own loss, which is the `loss` of its output.
        optimizer: Takes parameters and returns a torch optimiser, for example `partial(torch.optim.SGD, lr=0.1)`. If
            its argument is called `named_parameters`, it is given pairs of full name and parameter. It may be made
            already, on the parameters of `model`: it is made again in functions, and left as training leaves it.
        name: The model's name in profiles and reports, by default that of its class.
        weights: Safetensors files by path or URL, from which functions read what they need (docs/large_models.md).
        blocks: Paths of modules that become one layer each, whatever is inside.
        compile: Must be False.
        clip_grad_norm: Before each step, the gradient of the whole model is scaled down to this norm if it is larger.
        clip_grad_value: Before each step, each element of the gradient is brought between minus and plus this value.
        scheduler: Takes the optimiser and returns a scheduler of torch.optim.lr_scheduler; or one that is made already.
        scheduler_interval: The scheduler is stepped at the end of each "epoch", or after each training "step"; a
            ReduceLROnPlateau after each validation.
        scheduler_monitor: The result of validation that a ReduceLROnPlateau looks at.
        average: An EMA or SWA keeps an average of the parameters, which is `averaged` in the result of `train`.
        teachers: A Teacher or several: frozen parts of the module that average other parts of it.
        precision: Module and loss compute in "fp32", or in "bf16" or "fp16" as under `torch.autocast`;
            "bf16-mixed" and "16-mixed" mean the same.
        on_nan: A step with NaN or infinite numbers ends the run ("stop"), is left out ("skip") or is taken ("ignore").
        coupled: Where the loss of a batch is not the mean of its micro-batches' losses, `train` refuses it ("refuse");
            with "cache", plans keep all outputs of a global batch and compute its loss once, as one process does; with
            "accumulate", it trains on that mean, as gradient accumulation does.
        reduction: The loss returns a "mean"; or its sum and what that weighs, such as a number of tokens ("weighted");
            or torch's mean over targets that are not ignored ("tokens").

    Raises:
        InputError: An argument is wrong, or an optimiser or a scheduler cannot be made, or saved and continued.
    """

    @arguments.strict
    @CompilerDeferred()
    def fit(
        self,
        dataset: Data,
        *,
        epochs: int = 1,
        platform: str = LOCAL,
        like: str | PlatformSpec | None = None,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        time_value: float = 0.0,
        seed: int = 0,
        shuffle: bool = True,
        validation: Validation | Data | None = None,
        faults: FaultTolerance = DEFAULT_FAULTS,
        limits: RunLimits = NO_LIMITS,
        settings: RunSettings = DEFAULT_SETTINGS,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        confirm: Confirm | None = None,
        **keywords: Unpack[RunKeywords],
    ) -> RunResult:
        """Profile and plan where that is not done yet, say in three lines what was chosen and what it costs, and train.

        Args:
            platform: Where functions run; of several with commas between them, such as "local,aws-lambda", the cheapest
                that keeps `limits`, by predictions that runs there have corrected.
            global_batch: The samples of a step, by default the `batch_size` of the DataLoader, or 32 without one.
            micro_batch: The samples that a function takes at once, by default the best of some that are measured here.
            time_value: What an hour saved is worth in dollars: the plan is the cheapest by that.
            progress: Say what was chosen, on stderr, and draw a bar.

        The other arguments are those of `train`. A profile and a plan that the module has already are used if they are
        for this; a run that is resumed goes on by its own plan. Raises Infeasible if no plan fits, and what `profile`
        and `train` raise.
        """
        settings = settings_with(settings, keywords)
        wanted = Wanted(
            platform=platform, like=like, global_batch=global_batch, micro_batch=micro_batch, time_value=time_value
        )
        job: dict[str, Any] = {"epochs": epochs, "validation": validation, "settings": settings}
        with clusters(platform), resumed_by("fit"):
            platform, chosen = choose_among_places(self, dataset, wanted, limits=limits, **job)
            if progress:
                say("\n".join(chosen.lines))
            job |= {"platform": platform, "like": like, "plan": chosen.plan, "seed": seed, "shuffle": shuffle}
            job |= {"faults": faults, "limits": limits, "callbacks": callbacks, "progress": progress}
            return self.train(dataset, **job, confirm=confirm)
