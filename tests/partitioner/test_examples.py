"""What the modules say by way of example is true: their doctests, and the numbers that they work out by hand."""

import doctest
import itertools
import pkgutil
from dataclasses import replace
from importlib import import_module

import numpy as np

import funcpipe.partitioner
from funcpipe.core import ScheduleKind, TensorProfile, TrainingSpec, stages_of_layers
from funcpipe.partitioner.cost.loads import stage_ties
from funcpipe.partitioner.problem.cuts import crossing_bytes, merge_layers, starts_of
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.problem.stage_graph import build_stage_graph
from funcpipe.partitioner.search.initial_bounds import lane_caps
from funcpipe.partitioner.search.labels import Labels, extended, paths_of
from funcpipe.partitioner.search.option_network import OptionNetwork, path_costs
from funcpipe.partitioner.search.spaces import all_spaces, with_stage_counts
from tests.partitioner.instances import chain, platform

NAMES = [item.name for item in pkgutil.walk_packages(funcpipe.partitioner.__path__, "funcpipe.partitioner.")]


def test_doctests() -> None:
    failed = [name for name in (*NAMES, "funcpipe.core.routes") if doctest.testmod(import_module(name)).failed]
    assert failed == []


def network(layers: int, schedule: ScheduleKind = ScheduleKind.GPIPE) -> tuple[Problem, OptionNetwork]:
    training = TrainingSpec(global_batch=16, replicas=(1,), schedule=schedule)
    problem = Problem(profile=chain(layers, 1, 1), spec=platform(1, lifetime_s=None), training=training)
    return problem, next(all_spaces(problem)).network


def test_a_network_of_two_layers() -> None:
    _, two = network(2)
    assert two.leaving.tolist() == [0, 0, 1, 3]
    assert list(zip(two.options.before, two.options.after, strict=True)) == [(1, 0), (2, 1), (2, 0)]
    paths = np.array([[1, 2], [0, -1]])
    found = path_costs(two, paths, np.zeros_like(paths))
    assert found.stages.tolist() == [2, 1]
    at_node = [Labels.of_end(2)]
    at_node += [extended(two, 1, at_node)]
    at_node += [extended(two, 2, at_node)]
    assert [len(labels) for labels in at_node] == [1, 1, 2]
    assert sorted(zip(*paths_of(two, at_node, range(2)).tolist(), strict=True)) == [(1, 0), (2, -1)]


def test_caps_on_lanes() -> None:
    _, three = network(2)
    zeros = np.zeros(3)
    costs = three.costs._replace(forward_lane_s=np.array([1.0, 2.0, 4.0]), backward_lane_s=zeros)
    caps = lane_caps(replace(three, options=replace(three.options, costs=costs)), 2)
    assert caps.caps_s.tolist() == [1.0, 4.0]
    assert caps.least_lane_s.tolist() == [1.0, 2.0]
    assert caps.first.tolist() == [0, 1, 1]


def test_settings_of_four_micro_batches() -> None:
    training = TrainingSpec(global_batch=16, sync=None)
    problem = Problem(profile=chain(2, 1, 1), spec=platform(1), training=training)
    kinds = {(setting.replicas, setting.schedule) for setting in problem.settings()}
    assert len(kinds) == 7


def test_nodes_multiplied_by_the_stages_behind_them() -> None:
    problem, plain = network(2, ScheduleKind.ONE_F_ONE_B)
    wide = with_stage_counts(next(all_spaces(problem)), plain)
    # with one stage behind it a stage holds two of four micro-batches, with none behind it a single one
    assert sorted(wide.costs.share.tolist()) == [0.5, 1.0, 1.0, 1.0]


def test_edges_of_three_layers_and_nodes_of_a_skip_connection() -> None:
    assert len(build_stage_graph(chain(3, 1)).first) == 6
    sent = [(0, (1, 2)), (1, (2,))]
    tensors = tuple(
        TensorProfile(name=f"t{a}", producer=a, consumers=b, forward_bytes=8, backward_bytes=8) for a, b in sent
    )
    graph = build_stage_graph(replace(chain(3, 1), tensors=tensors))
    assert sorted(graph.position.tolist()) == [0, 1, 1, 2, 2, 3]


def test_layers_that_are_merged() -> None:
    profile = chain(3, 1)
    layers = [
        replace(layer, forward_s=(weight,), backward_s=(0.0,), parameter_bytes=0, activation_bytes=0)
        for layer, weight in zip(profile.layers, (5.0, 1.0, 4.0), strict=True)
    ]
    tensors = [
        replace(tensor, forward_bytes=size, backward_bytes=0)
        for tensor, size in zip(profile.tensors, (10, 90), strict=True)
    ]
    profile = replace(profile, layers=tuple(layers), tensors=tuple(tensors))
    merged = merge_layers(profile, 2)
    assert starts_of(merged, profile) == (0, 1, 3)
    assert crossing_bytes(merged).tolist() == [0.0, 10.0, 0.0]


def test_ties_of_two_stages() -> None:
    profile = next(
        some for seed in itertools.count() if (some := chain(4, 1, seed, skips=1)).ties and len(some.ties) == 1
    )
    tied = replace(profile, ties=(replace(profile.ties[0], layers=(0, 3), parameter_bytes=8),))
    two = stage_ties(np.array([0, 2]), np.array([2, 4]), tied)
    assert two.borrowed_bytes.tolist() == [0.0, 8.0]
    assert two.upload_objects.tolist() == two.download_objects.tolist() == [1.0, 1.0]
    one = stage_ties(np.array([0]), np.array([4]), tied)
    assert (one.repeated_bytes.item(), one.upload_objects.item()) == (8.0, 0.0)
    assert stages_of_layers([(0, 2), (2, 4)]) == (0, 0, 1, 1)
