"""One function's life: the loop over steps and their tasks, heartbeats, checkpoints, hand-over, recovery of peers."""
