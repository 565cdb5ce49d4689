"""The state of a run in object storage: keys, documents, leases, checkpoints, generations, and resuming."""
