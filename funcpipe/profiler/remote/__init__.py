"""Functions that measure their platform, and the layers of a model on it."""
