"""The journal of a study in object storage, as Optuna uses it, and how it goes on in another client."""

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState

from funcpipe.errors import InvalidValue, RunTaken
from funcpipe.sweep.study import JournalKeys, StorageJournal, SweepStudy
from funcpipe.testing.memory_storage import MemoryStorage

KEYS = JournalKeys("digits")


@given(
    writes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=12),
    reads=st.lists(st.integers(0, 20), max_size=3),
)
def test_all_writers_see_one_journal(writes: list[tuple[int, int]], reads: list[int]) -> None:
    storage = MemoryStorage()
    writers = [StorageJournal(storage, KEYS) for _ in range(3)]
    expected = list[dict[str, int]]()
    for number, (writer, count) in enumerate(writes):
        logs = [{"by": writer, "number": number, "part": part} for part in range(count)]
        writers[writer].append_logs(logs)
        expected += logs
    for journal in (*writers, StorageJournal(storage, KEYS)):
        assert [list(journal.read_logs(start)) for start in (0, *reads)] == [expected[start:] for start in (0, *reads)]


def test_optunas_own_study_lies_in_object_storage() -> None:
    storage = MemoryStorage()

    def opened() -> optuna.Study:
        journal = optuna.storages.JournalStorage(StorageJournal(storage, KEYS))
        return optuna.create_study(storage=journal, study_name="digits", load_if_exists=True)

    first, second = opened(), opened()
    first.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    second.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    assert [trial.number for trial in first.get_trials()] == [0, 1, 2, 3]
    assert first.best_value == second.best_value == min(trial.value or 9 for trial in second.get_trials())


def test_an_owner_holds_logs_back_and_writes_them_as_one_object() -> None:
    storage = MemoryStorage()
    journal = StorageJournal(storage, KEYS, owner=True)
    for number in range(5):
        journal.append_logs([{"number": number}])
    assert not storage.list("digits")
    assert len(list(journal.read_logs(0))) == 5
    journal.flush("a sampler")
    journal.flush()
    assert len(storage.list("digits")) == 1
    again = StorageJournal(storage, KEYS, owner=True)
    assert [log["number"] for log in again.read_logs(0)] == [0, 1, 2, 3, 4]
    assert again.sampler == "a sampler"
    again.append_logs([{"number": 5}])
    again.flush()
    journal.append_logs([{"number": 6}])
    with pytest.raises(RunTaken, match="goes on with the sweep"):
        journal.flush()


def study(storage: MemoryStorage, **settings: object) -> SweepStudy:
    given = {"direction": "minimize", "sampler": optuna.samplers.RandomSampler(seed=1), "pruner": None} | settings
    return SweepStudy(storage, KEYS, **given)  # type: ignore[arg-type]


def test_the_sampler_of_a_study_goes_on_where_it_was() -> None:
    def values(made: SweepStudy, count: int) -> list[float]:
        return [made.ask().suggest_float("lr", 0, 1) for _ in range(count)]

    alone, storage = values(study(MemoryStorage()), 6), MemoryStorage()
    first = study(storage)
    found = values(first, 2)
    first.save(0.5)
    values(first, 1)  # a trial that is lost, with what the sampler has drawn for it
    second = study(storage)
    assert [*found, *values(second, 4)] == alone
    assert second.client_usd == 0.5
    assert [trial.state for trial in second.trials()] == [TrialState.RUNNING] * 6


def test_a_trial_that_goes_on_keeps_its_values_and_draws_none() -> None:
    storage = MemoryStorage()
    first = study(storage)
    value = first.ask().suggest_float("lr", 0, 1)
    first.save(0.0)
    second = study(storage)
    assert second.again(second.trials()[0]).suggest_float("lr", 0, 1) == value
    reference = study(MemoryStorage())
    drawn = [reference.ask().suggest_float("lr", 0, 1) for _ in range(2)]
    assert [value, second.ask().suggest_float("lr", 0, 1)] == drawn


def test_a_study_that_goes_on_has_the_direction_and_the_sampler_that_it_had() -> None:
    storage = MemoryStorage()
    study(storage).save(0.0)
    with pytest.raises(InvalidValue, match="direction must be minimize, as when the sweep digits began"):
        study(storage, direction="maximize")
    with pytest.raises(InvalidValue, match="sampler must be a RandomSampler"):
        study(storage, sampler=optuna.samplers.TPESampler())


def test_a_sampler_of_a_finite_space_ends_its_study() -> None:
    storage, grid = MemoryStorage(), {"lr": [0.1, 0.2]}
    made = study(storage, sampler=optuna.samplers.GridSampler(grid))
    for _ in range(2):
        assert not made.is_exhausted
        trial = made.ask()
        value = trial.suggest_float("lr", 0.0, 1.0)
        made.save(0.0)
        made.tell(trial, TrialState.COMPLETE, value)
    assert sorted(trial.params["lr"] for trial in made.trials()) == grid["lr"]
    assert made.is_exhausted
    assert study(storage, sampler=optuna.samplers.GridSampler(grid)).is_exhausted
