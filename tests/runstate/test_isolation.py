"""What code in a function can do to another run of its deployment: these attacks succeed, as docs/security.md says."""

import pytest

from funcpipe.core.run_key import RunKey
from funcpipe.errors import CorruptMessage, RunUnknown
from funcpipe.platforms.shared.cloud import KeyWrap, new_secret
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.functions import MarkedKeys, mark_detached
from funcpipe.runstate.generations import find_record, newest_record, write_record
from funcpipe.runstate.signing import SignedStorage
from funcpipe.testing.memory_storage import MemoryStorage
from tests.runstate.test_forgeries import OURS
from tests.runstate.test_signed_storage import KEYS, ORDER, by_another
from tests.support.run_keys import RUN_KEY, signed_for_tests


def our_run() -> MemoryStorage:
    storage = MemoryStorage()
    own = signed_for_tests(storage)
    put_document(own, KEYS.reservation, ORDER)
    write_record(own, KEYS, OURS)
    return storage


def test_whoever_may_write_to_the_bucket_can_end_a_run_and_never_changes_what_it_says() -> None:
    storage = our_run()
    write_record(by_another(storage), KEYS, OURS)
    with pytest.raises(CorruptMessage, match="is not signed by its run"):
        find_record(signed_for_tests(storage), KEYS)
    storage.delete_many(storage.list(KEYS.run_prefix))
    with pytest.raises(RunUnknown):
        newest_record(signed_for_tests(storage), KEYS.run)


def test_a_function_of_the_same_deployment_can_read_the_key_of_a_run_that_is_left_to_itself() -> None:
    storage, of_deployment = our_run(), KeyWrap(new_secret())
    assert MarkedKeys(storage, of_deployment.unwrap).find(KEYS) is None  # a run that its client watches
    mark_detached(storage, KEYS, of_deployment.wrap(RUN_KEY.text))
    found = MarkedKeys(storage, of_deployment.unwrap)
    assert found.find(KEYS) == RunKey(RUN_KEY.text)
    assert newest_record(SignedStorage(storage, found), KEYS.run) == OURS
    assert MarkedKeys(storage, KeyWrap(new_secret()).unwrap).find(KEYS) is None  # a function of another deployment
