"""Small models with their data, for the examples of the documentation and for first tries; nothing else uses them."""
