"""Entry points of functions: one module for each runtime, and their common part."""
