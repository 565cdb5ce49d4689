from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import ActivationRoute, GradientRoute, TensorProfile, find_routes, stages_of_layers


def tensor(name: str, producer: int, *consumers: int, forward: int = 8, backward: int = 8) -> TensorProfile:
    return TensorProfile(
        name=name, producer=producer, consumers=consumers, forward_bytes=forward, backward_bytes=backward
    )


def test_tensors_for_the_same_stages_share_an_object_and_gradients_return_to_their_producer() -> None:
    tensors = [tensor("a", 0, 1, 2), tensor("b", 0, 2), tensor("mask", 0, 2, backward=0), tensor("c", 1, 2)]
    routes = find_routes([0, 1, 2], tensors)
    assert routes.activations == (
        ActivationRoute(producer=0, consumers=(1, 2), tensors=("a",), payload_bytes=8),
        ActivationRoute(producer=0, consumers=(2,), tensors=("b", "mask"), payload_bytes=16),
        ActivationRoute(producer=1, consumers=(2,), tensors=("c",), payload_bytes=8),
    )
    assert routes.gradients == (
        GradientRoute(consumer=1, producer=0, tensors=("a",), payload_bytes=8),
        GradientRoute(consumer=2, producer=0, tensors=("a", "b"), payload_bytes=16),
        GradientRoute(consumer=2, producer=1, tensors=("c",), payload_bytes=8),
    )


def test_the_objects_of_each_producer_are_numbered() -> None:
    routes = find_routes([0, 1, 2], [tensor("a", 0, 1, 2), tensor("b", 0, 2), tensor("c", 1, 2)])
    found = [(part, route.producer, route.tensors) for part, route in routes.numbered_activations()]
    assert found == [(0, 0, ("a",)), (1, 0, ("b",)), (0, 1, ("c",))]


def test_each_layer_lies_in_one_stage() -> None:
    assert stages_of_layers([(0, 2), (2, 3), (3, 5)]) == (0, 0, 1, 2, 2)


def test_what_stays_within_a_stage_does_not_travel() -> None:
    assert find_routes([0, 0], [tensor("a", 0, 1)]).activations == ()


@given(st.data())
def test_each_crossing_tensor_reaches_each_of_its_stages_once(data: st.DataObject) -> None:
    layers = data.draw(st.integers(2, 8))
    cuts = data.draw(st.sets(st.integers(1, layers - 1)))
    stage_of_layer = [sum(cut <= layer for cut in cuts) for layer in range(layers)]
    tensors = []
    for producer in range(layers - 1):
        consumers = data.draw(st.sets(st.integers(producer + 1, layers - 1), min_size=1))
        tensors.append(tensor(f"t{producer}", producer, *sorted(consumers)))
    routes = find_routes(stage_of_layer, tensors)
    sent = sorted(
        (name, route.producer, consumer)
        for route in routes.activations
        for name in route.tensors
        for consumer in route.consumers
    )
    expected = {
        (t.name, stage_of_layer[t.producer], stage_of_layer[c])
        for t in tensors
        for c in t.consumers
        if stage_of_layer[c] != stage_of_layer[t.producer]
    }
    assert sent == sorted(expected)
    returned = {(name, r.producer, r.consumer) for r in routes.gradients for name in r.tensors}
    assert returned == expected
