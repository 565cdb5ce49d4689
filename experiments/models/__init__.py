"""Models to plan for and to train.

Each module offers `model()`, `sample()`, the inputs of one micro-batch, and `loss(output, target)`. Those to train have
`train_data()`, `test_data()` and `optimizer(parameters)` too; those to plan for have a `target()` beside `sample()`.
No factory needs an argument, so that `experiments.models.digits:model` names one on a command line.
"""
