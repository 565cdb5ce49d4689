"""One function of a run: the loop over steps and their tasks, heartbeats, checkpoints, hand-over, recovery of peers."""
