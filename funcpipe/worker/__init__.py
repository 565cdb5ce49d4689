"""One function's life: its loop over steps, tasks, heartbeat, checkpoints, hand-over, and recovery of peers."""
