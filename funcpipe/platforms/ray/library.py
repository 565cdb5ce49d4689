"""Ray's library; where it is not installed, importing this module says how to install it."""

from funcpipe.core.distribution import needed_from

with needed_from("ray"):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["NodeAffinitySchedulingStrategy", "ray"]
