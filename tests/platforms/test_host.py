"""What hosts of functions share: functions that are stopped, and watchdogs of runs that are left alone."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

from funcpipe.core import WatchSpec
from funcpipe.platforms.base import State, Status
from funcpipe.platforms.shared.host import STOPPED, Host, HostedFunction


class Hosting(Host[HostedFunction]):
    """A host whose functions end as soon as they are killed; `watchdogs` are those that were started, by run."""

    def __init__(self) -> None:
        super().__init__()
        self.watchdogs: list[tuple[str, HostedFunction]] = []
        self.abandoned: list[HostedFunction] = []

    def start(self, run: str, name: str) -> HostedFunction:
        self._functions[name] = function = HostedFunction(run=run)
        return function

    def watch(self, run: str) -> None:
        self._watch(WatchSpec(storage="memory://", run=run, run_key="", until_ended=True))

    async def stop(self, name: str) -> None:
        await self._end(self._functions[name])

    def watched(self) -> list[str]:
        return [run for run, watchdog in self.watchdogs if watchdog not in self.abandoned]

    def _kill(self, function: HostedFunction) -> None:
        function.status = STOPPED
        function.ended.set()

    def _abandon(self, watchdog: HostedFunction) -> None:
        self.abandoned.append(watchdog)

    def _start_watchdog(self, spec: WatchSpec) -> HostedFunction:
        self.watchdogs.append((str(spec.run), HostedFunction(run="")))
        return self.watchdogs[-1][1]


def play(scenario: Callable[[Hosting], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        await scenario(Hosting())

    with ThreadPoolExecutor(1) as pool:  # where no loop runs, as one does where a test has opened a browser
        pool.submit(lambda: asyncio.run(run())).result()


async def turns() -> None:
    """Let all tasks do what they can without waiting."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_run_loses_its_watchdog_with_its_last_function_and_others_keep_theirs() -> None:
    async def scenario(host: Hosting) -> None:
        functions = [host.start(run, f"{run}/{number}") for run in ("a", "b") for number in range(2)]
        for run in ("a", "b", "a"):
            host.watch(run)
        await turns()
        assert host.watched() == ["a", "b"]
        await host.stop("a/0")
        await turns()
        assert host.watched() == ["a", "b"]
        await host.stop("a/1")
        await turns()
        assert host.watched() == ["b"]
        assert [function.status for function in functions] == [STOPPED] * 2 + [Status(state=State.RUNNING)] * 2

    play(scenario)


def test_a_run_that_is_started_again_at_once_is_watched_again() -> None:
    async def scenario(host: Hosting) -> None:
        host.start("a", "a/0")
        host.watch("a")
        await turns()
        await host.stop("a/0")
        host.start("a", "a/1")
        host.watch("a")
        await turns()
        assert [run for run, _ in host.watchdogs] == ["a", "a"]
        assert host.watched() == list(host._watchdogs) == ["a"]

    play(scenario)


def test_a_watchdog_that_is_done_is_not_replaced() -> None:
    async def scenario(host: Hosting) -> None:
        host.start("a", "a/0")
        host.watch("a")
        await turns()
        ((_, watchdog),) = host.watchdogs
        watchdog.status = Status(state=State.DONE)
        watchdog.ended.set()
        await turns()
        assert (len(host.watchdogs), host._watchdogs, host.abandoned) == (1, {}, [])

    play(scenario)
