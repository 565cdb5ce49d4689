"""Cuts for experiments that want a given number of stages."""

from funcpipe.core import ModelProfile


def even_cuts(profile: ModelProfile, stages: int) -> tuple[str, ...]:
    """The layers at which to cut for `stages` stages of about the same computation, for `Pins(cuts=...)`."""
    times = [layer.forward_s[-1] + layer.backward_s[-1] for layer in profile.layers]
    before = [sum(times[:i]) / sum(times) for i in range(len(times))]
    wanted = [number / stages for number in range(1, stages)]
    places = {min(range(1, len(times)), key=lambda i: abs(before[i] - share)) for share in wanted}
    return tuple(profile.layers[place].graph_layers[0] for place in sorted(places))
