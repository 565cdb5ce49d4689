"""Storage keys of a measurement's objects."""


def bundle(run: str, layer: int) -> str:
    """The code of a layer."""
    return f"{run}/layers/{layer}.bundle"


def tensors(run: str, layer: int) -> str:
    """The parameters and the inputs of a layer."""
    return f"{run}/layers/{layer}.tensors"


def machine(run: str, probe: int) -> str:
    """The MachineReport of a function."""
    return f"{run}/probes/{probe}/machine"


def layer(run: str, size: str, layer: int) -> str:
    """The LayerReport of a function of some size."""
    return f"{run}/times/{size}/{layer}"


def failure(run: str, probe: int) -> str:
    """The traceback of a function that failed."""
    return f"{run}/probes/{probe}/failure"


def scratch(run: str, probe: int) -> str:
    """An object that a function writes and reads to time the storage."""
    return f"{run}/probes/{probe}/trial"
