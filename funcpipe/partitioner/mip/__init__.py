"""The optimisation problem as mixed-integer programmes for solvers."""
