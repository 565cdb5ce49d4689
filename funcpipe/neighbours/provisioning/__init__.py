"""The whole job: λDNN, Cynthia and spotDNN beside our own plans; what to rent, for how long, for how much.

A module predicts what a configuration takes, and searches among configurations; the two are separate functions.
"""
