"""Storage keys of a measurement's objects."""


def bundle(run: str, layer: int) -> str:
    """Return the key of the code of a layer."""
    return f"{run}/layers/{layer}.bundle"


def tensors(run: str, layer: int) -> str:
    """Return the key of the parameters and the inputs of a layer."""
    return f"{run}/layers/{layer}.tensors"


def machine(run: str, probe: int) -> str:
    """Return the key of the MachineReport of a function."""
    return f"{run}/probes/{probe}/machine"


def layer(run: str, size: str, layer: int) -> str:
    """Return the key of the LayerReport of a function of some size."""
    return f"{run}/times/{size}/{layer}"


def failure(run: str, probe: int) -> str:
    """Return the key of the traceback of a function that failed."""
    return f"{run}/probes/{probe}/failure"


def scratch(run: str, probe: int) -> str:
    """Return the key of an object that a function writes and reads to time the storage."""
    return f"{run}/probes/{probe}/trial"
