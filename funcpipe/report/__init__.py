"""Predictions of plans, predicted compared with observed, and pictures of both."""
