"""A plan, its prediction and a run as one HTML page that needs no network."""
