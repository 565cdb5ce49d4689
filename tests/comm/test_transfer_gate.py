import threading
from contextlib import ExitStack

from funcpipe.comm.transfer_gate import TransferGate
from tests.support.waiting import LONG_S


def test_reserved_turns_are_taken_in_the_order_of_reservation() -> None:
    gate, passed = TransferGate(), []
    with ExitStack() as stack:
        places = [stack.enter_context(gate.reserve()) for _ in range(8)]

        def move(number: int) -> None:
            with places[number]:
                passed.append(number)

        threads = [threading.Thread(target=move, args=(number,)) for number in reversed(range(8))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert passed == list(range(8))


def test_some_turns_go_ahead_of_those_that_were_reserved_before() -> None:
    gate, passed = TransferGate(), []
    with ExitStack() as stack:
        places = [stack.enter_context(gate.reserve(ahead=ahead)) for ahead in (False, True, False, True)]

        def move(number: int) -> None:
            with places[number]:
                passed.append(number)

        threads = [threading.Thread(target=move, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert passed == [1, 3, 0, 2]


def test_a_turn_that_is_given_up_holds_up_nobody() -> None:
    gate = TransferGate()
    passed = threading.Event()

    def move() -> None:
        with gate.reserve() as place:
            reserved.set()
            with place:
                passed.set()

    reserved = threading.Event()
    with gate.reserve():
        thread = threading.Thread(target=move)
        thread.start()
        reserved.wait(LONG_S)
        assert not passed.wait(0.02)
    thread.join(10)
    assert passed.is_set()


def test_a_turn_may_be_taken_again() -> None:
    gate = TransferGate()
    with gate.reserve() as place:
        for _ in range(2):
            with place:
                pass


def test_a_ticket_holds_up_nobody_until_it_is_used() -> None:
    gate = TransferGate()
    early, late = gate.ticket(), gate.ticket()
    with late:
        pass
    with early:
        pass


def test_of_the_tickets_at_the_gate_the_first_that_was_drawn_passes() -> None:
    passed: list[int] = []
    waiting = threading.Semaphore(0)

    class Watched(TransferGate):
        def enter(self, number: tuple[bool, int]) -> None:
            with self._changed:  # let go of only while it waits inside
                waiting.release()
                super().enter(number)

    gate = Watched()
    tickets = [gate.ticket() for _ in range(6)]

    def move(number: int) -> None:
        with tickets[number]:
            passed.append(number)

    with tickets[0]:
        threads = [threading.Thread(target=move, args=(number,)) for number in (4, 2, 5, 3, 1)]
        for thread in threads:
            thread.start()
        for _ in range(1 + len(threads)):
            assert waiting.acquire(timeout=LONG_S)
    for thread in threads:
        thread.join()
    assert passed == [1, 2, 3, 4, 5]
