"""How workers live and die: checkpoints, leases, heartbeats, hand-over, restarts by peers, limits."""
