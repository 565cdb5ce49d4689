"""From a profile, a platform and a wish to a plan: where to cut, how much memory, how many replicas."""
