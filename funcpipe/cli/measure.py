"""The verbs profile and platforms: what is measured of a model, of a platform and of a storage."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe import show
from funcpipe.cli import training
from funcpipe.cli.factories import check_names, load_data, make_sample
from funcpipe.cli.files import write_file
from funcpipe.cli.options import FACTORY, Choice, Option, argument, group, option, positive, setting, whole
from funcpipe.cli.verbs import Options, verb
from funcpipe.core import PlatformSpec, to_text, write
from funcpipe.errors import InputError
from funcpipe.partitioner import PROFILED_LAYERS
from funcpipe.platforms.catalog import LOCAL, load_spec, open_storage, spec_names

if TYPE_CHECKING:
    import torch

    from funcpipe.client.prepare.session import Site


PROFILE = argument(
    "PROFILE", "profile to plan from, written by `funcpipe profile`", "profile", key="model.profile", reads=True
)


def planned_platform(default: str | None = None) -> list[Option]:
    """The option of the platform where functions will run."""
    text = (
        "where functions will run: a name that `funcpipe platforms` lists, with ?region=REGION for another region, or "
        "a specification of your own"
    )
    text = text if default else f"{text} (default: the profile's)"
    own = "a platform specification, as --platform"
    return [
        option("--platform NAME|FILE", text, None, default, one_of="platform", key="platform.name", reads=True),
        setting("platform.spec FILE", own, one_of="platform", reads=True),
    ]


_MEASURING = (
    option("--like NAME", "give local functions the limits of this platform"),
    option("--max-usd USD", "spend no more than this on functions", positive),
)
"""The options of functions that are started to measure."""


@verb(
    "funcpipe profile funcpipe.examples.spirals:model --sample funcpipe.examples.spirals:sample \\\n"
    "    --micro-batch 16 --platform local -o profile.json",
    training.MODEL,
    group(
        "model",
        option(
            f"--sample {FACTORY}",
            "factory that returns one micro-batch of inputs: a tuple, or a dict of named arguments; or a DataLoader "
            "whose collate_fn makes micro-batches",
            needed=True,
        ),
        option(
            f"--data {FACTORY}", "factory that returns the dataset to train on, or its URL: loading is measured too"
        ),
        option("--micro-batch N", "samples per micro-batch", whole(), 4),
        setting("model.repeats N", "how many times to time each layer; 0: estimate by operations", whole(0), 5),
        setting("model.layers N", "fold light layers until N are left", whole(), PROFILED_LAYERS),
        training.BLOCKS,
        training.TEACHERS,
        training.precision("fp32"),
    ),
    group(
        "platform",
        planned_platform("aws-lambda"),
        option(
            "--on PLATFORM",
            "time the layers in functions of every size: `local`, or a deployment's URL "
            "(default: time them in this process and scale to the platform's sizes)",
            key="platform.profile-on",
        ),
        *_MEASURING,
    ),
    group(
        "output",
        option(
            "-o --output FILE",
            "where to write the profile",
            None,
            "profile.json",
            key="model.profile",
            writes="profile",
        ),
    ),
    table="model",
)
def profile(options: Options) -> None:
    """Measure the layers of a model and write the profile."""
    check_names({"the model": options.model, "--sample": options.sample})
    spec = load_spec(options.spec or options.platform)
    like = load_spec(options.like) if options.like else None
    if options.on is None and (options.like or options.max_usd is not None):
        raise InputError("--like and --max-usd apply to functions; say where they run: --on local")
    pipe = training.pipe_of(options, loss_fn=_no_loss, optimizer=_no_optimizer)
    sample = make_sample(options.sample)
    with _open_site(options.on, like) as site, show.profiling(quiet=options.quiet) as progress:
        measured = pipe.profile(
            sample,
            platform=spec,
            micro_batch=options.micro_batch,
            repeats=options.repeats,
            layers=options.layers,
            dataset=None if options.data is None else load_data(options.data),
            on=site,
            max_usd=options.max_usd,
            progress=progress,
        )
    write_file(partial(write, measured), options.output)
    show.show(options.json, to_text(measured), partial(show.profile, measured, options.output))


@verb(
    "funcpipe platforms show aws-lambda --json\n"
    "  funcpipe platforms measure local --like aws-lambda -o mine.json\n"
    "  funcpipe platforms measure --storage redis://host/0",
    argument(
        "{list,show,measure}",
        "list all platforms, show one, or measure one with functions of every size (default: list)",
        "action",
        Choice(("list", "show", "measure")),
        "list",
        needed=False,
    ),
    argument(
        "PLATFORM",
        "name or specification file to show; or where to measure: `local`, or a deployment's URL",
        "name",
        needed=False,
    ),
    group(
        "measure",
        *_MEASURING,
        option(
            "-o --output FILE", "where to write what was measured (required for a specification)", writes="platform"
        ),
        option("--storage URL", "measure this storage from here, without functions: latencies and bandwidths"),
        setting("platform.streams N", "of --storage: how many bodies move at once (default: 4)", whole()),
        setting("platform.body-mb MB", "of --storage: the largest body that is moved (default: 64)", whole()),
    ),
)
def platforms(options: Options) -> None:
    """List, show or measure platform specifications."""
    if options.action == "list" and options.name is not None:
        raise InputError(f"list takes no platform; did you mean: funcpipe platforms show {options.name}")
    if options.action != "measure" and options.output is not None:
        raise InputError(f"{options.action} writes no file; -o is for measure (with --json, a shell's > does it)")
    if options.action != "measure" and options.storage is not None:
        raise InputError(f"{options.action} measures nothing; --storage is for measure")
    if options.storage is None and {"streams", "body_mb"} & {*options.given}:
        raise InputError("platform.streams and platform.body-mb are about a storage; name it: --storage URL")
    if options.action == "list":
        specs = [load_spec(name) for name in spec_names()]
        show.show(options.json, show.as_json([spec.name for spec in specs]), partial(show.platforms, specs))
    elif options.action == "measure":
        _measure_storage(options) if options.storage is not None else _measure(options)
    elif options.name is None:
        raise InputError(f"name the platform to show: {', '.join(spec_names())}, or a specification's file")
    else:
        spec = load_spec(options.name)
        show.show(options.json, to_text(spec), partial(show.platform, spec))


def _open_site(name: str | None, like: PlatformSpec | None) -> "AbstractContextManager[Site | None]":
    """The platform called `name`, with the limits of `like`; None for this process."""
    if name is None:
        return nullcontext()
    from funcpipe.client.prepare.session import open_site

    return open_site(name, like=like)


def _measure_storage(options: Options) -> None:
    """Show what this process measures of a storage."""
    if options.name is not None or options.like or options.max_usd is not None:
        raise InputError("--storage is measured from here: it goes without a platform, --like and --max-usd")
    from funcpipe.profiler.remote.storage_speed import BODY_MB, STREAMS, measure_storage

    storage = open_storage(options.storage, retry_s=0)
    streams, body_bytes = options.streams or STREAMS, (options.body_mb or BODY_MB) * 1_000_000
    report = measure_storage(storage, options.storage, streams=streams, body_bytes=body_bytes)
    if options.output is not None:
        write_file(partial(write, report), options.output)
    show.show(options.json, to_text(report), partial(show.storage_report, report))


def _measure(options: Options) -> None:
    """Write the specification of a platform with what functions measure there."""
    if options.output is None:
        raise InputError("say where to write the specification: -o FILE")
    like = load_spec(options.like) if options.like else None
    with _open_site(options.name or LOCAL, like) as site:
        assert site is not None, "it has a name"
        spec = site.measure(max_usd=options.max_usd)
    write_file(partial(write, spec), options.output)
    show.show(options.json, to_text(spec), partial(show.platform, spec))


def _no_loss(output: Any, target: Any) -> "torch.Tensor":
    """The sum of all outputs, which stands for the loss: its gradients are those that a profile without one takes."""
    from torch import Tensor

    from funcpipe.model.tensors import flatten

    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((leaf.sum() for leaf in leaves[1:]), leaves[0].sum())


def _no_optimizer(parameters: Any) -> "torch.optim.Optimizer":
    """The optimiser of a profile, which takes no step."""
    import torch

    return torch.optim.SGD(parameters, lr=0.0)
