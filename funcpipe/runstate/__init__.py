"""What a run keeps in object storage: keys, documents, leases, checkpoints, generations, and how it is resumed."""
