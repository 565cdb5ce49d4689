"""Random graphs with random durations: the executor and the simulator take the tasks of each lane in the same order.

The executor runs for real, on its threads, but no time passes: each task of a worker ends when everything that ended
before it in the simulation has ended. Before an end, the executor must have started all that the simulator has started
by then, and nothing that the simulator has not.
"""

import random
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from funcpipe.comm.transfer_gate import TransferGate
from funcpipe.core import Resource
from funcpipe.scheduler.execute import TaskResult, execute
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.lane_rules import ORDERS, SIDE_BY_SIDE, Order
from funcpipe.scheduler.simulator.costs import Cost
from funcpipe.scheduler.simulator.simulate import simulate
from funcpipe.scheduler.tasks import Kind, Task, source_of
from tests.scheduler.shapes import shapes

PATIENCE_S = 30.0


class Replay:
    """Does the tasks of one worker in the order of a simulation: `moments` are its starts, bodies and ends, in order.

    A get is started by the simulator when its object is there, by the executor before that; so the moment that counts
    for it is when it asks for its lane. The transfer gates are those of training.
    """
