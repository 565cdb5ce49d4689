"""Where the objects of a measurement lie in the storage."""


def bundle(run: str, layer: int) -> str:
    """The code of a layer."""
    return f"{run}/layers/{layer}.bundle"


def tensors(run: str, layer: int) -> str:
    """The parameters of a layer, and what it is run on."""
    return f"{run}/layers/{layer}.tensors"


def machine(run: str, probe: int) -> str:
    """What a function says of its platform."""
    return f"{run}/probes/{probe}/machine"


def layer(run: str, size: str, layer: int) -> str:
    """What a function of a size says of a layer."""
    return f"{run}/times/{size}/{layer}"


def failure(run: str, probe: int) -> str:
    """The traceback of a function that failed."""
    return f"{run}/probes/{probe}/failure"


def trial(run: str, probe: int) -> str:
    """An object that a function writes and reads to see how fast that is."""
    return f"{run}/probes/{probe}/trial"
