"""How workers live and die: checkpoints, leases, heartbeats, hand-over, limits."""
