"""A run as its client handles it: prepare, launch, supervise, collect; and status, stop, clean from outside."""
