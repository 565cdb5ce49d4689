"""A plan played on a virtual clock, predicted beside observed, and pictures of both."""
