import threading
from contextlib import ExitStack

from funcpipe.comm.transfer_gate import TransferGate


def test_reserved_turns_are_taken_in_the_order_of_reservation() -> None:
    turns, passed = TransferGate(), []
    with ExitStack() as stack:
        gates = [stack.enter_context(turns.reserve()) for _ in range(8)]

        def move(number: int) -> None:
            with gates[number]:
                passed.append(number)

        threads = [threading.Thread(target=move, args=(number,)) for number in reversed(range(8))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert passed == list(range(8))


def test_some_turns_go_ahead_of_those_that_were_reserved_before() -> None:
    turns, passed = TransferGate(), []
    with ExitStack() as stack:
        gates = [stack.enter_context(turns.reserve(ahead=ahead)) for ahead in (False, True, False, True)]

        def move(number: int) -> None:
            with gates[number]:
                passed.append(number)

        threads = [threading.Thread(target=move, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert passed == [1, 3, 0, 2]


def test_a_turn_that_is_given_up_holds_up_nobody() -> None:
    turns = TransferGate()
    passed = threading.Event()

    def move() -> None:
        with turns.reserve() as gate:
            reserved.set()
            with gate:
                passed.set()

    reserved = threading.Event()
    with turns.reserve():
        thread = threading.Thread(target=move)
        thread.start()
        reserved.wait(10)
        assert not passed.wait(0.02)
    thread.join(10)
    assert passed.is_set()


def test_a_turn_may_be_taken_again() -> None:
    turns = TransferGate()
    with turns.reserve() as gate:
        for _ in range(2):
            with gate:
                pass
    with turns:
        pass
