"""One run's life as its client sees it: prepare, launch, supervise, collect; and status, stop, clean from outside."""
