"""What servers of Redis say, and what becomes of it; the contract suite has the rest."""

import logging
import secrets
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from funcpipe.errors import KeyMissing, PlatformRefused, StorageBusy, StorageError
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.redis import MOST_BYTES, RedisStorage
from tests.redis_servers import redis_server


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield port


@pytest.fixture
def store(port: int) -> Storage:
    return RedisStorage("127.0.0.1", port, prefix=secrets.token_hex(8))


def test_a_password_is_needed_and_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server(tmp_path, "--requirepass", "right") as port:
        with pytest.raises(PlatformRefused, match="set REDIS_PASSWORD"):
            open_storage(f"redis://127.0.0.1:{port}")
        monkeypatch.setenv("REDIS_PASSWORD", "wrong")
        with pytest.raises(PlatformRefused, match="set REDIS_PASSWORD"):
            open_storage(f"redis://127.0.0.1:{port}")
        monkeypatch.setenv("REDIS_PASSWORD", "right")
        store = open_storage(f"redis://127.0.0.1:{port}/3?prefix=a")
        store.put("k", b"1")
        assert redis.Redis(port=port, db=3, password="right").get("a/k") == b"1"


def test_a_server_that_may_evict_objects_is_refused(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory-policy", "allkeys-lru") as port:
        with pytest.raises(PlatformRefused, match=r"maxmemory-policy is allkeys-lru.*set it to noeviction"):
            open_storage(f"redis://127.0.0.1:{port}")
        redis.Redis(port=port).config_set("maxmemory-policy", "volatile-lru")
        assert open_storage(f"redis://127.0.0.1:{port}").list("") == ()


def test_full_memory_is_an_error_with_a_way_out_and_gets_still_work(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "8mb") as port:
        store = RedisStorage("127.0.0.1", port)
        store.put("k", b"1")
        with pytest.raises(StorageError, match="raise its maxmemory"):
            fill(store)
        redis.Redis(port=port).config_set("maxmemory", "1mb")  # so that it stays full, whatever the server frees
        assert store.get("k") == b"1"
        with pytest.raises(KeyMissing):
            store.get("missing")
        redis.Redis(port=port).config_set("maxmemory", "8mb")
        store.delete_many(store.list("large/"))
        store.put("more", b"1")


def fill(store: Storage) -> None:
    for number in range(100):
        store.put(f"large/{number}", bytes(100_000))


def test_a_replica_is_refused(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--replicaof", "127.0.0.1", "1") as port:
        store = RedisStorage("127.0.0.1", port)
        with pytest.raises(PlatformRefused, match="give the address of its primary"):
            store.put("k", b"1")


def test_an_object_of_more_than_a_string_holds_is_refused_before_it_is_sent(store: Storage) -> None:
    with pytest.raises(StorageError, match=f"{MOST_BYTES + 1} bytes is larger than the {MOST_BYTES}"):
        store.put("k", memoryview(bytearray(MOST_BYTES + 1)))


def test_no_server_is_a_failure_that_may_pass() -> None:
    with socket.socket() as silent:  # which holds the port, and listens to nobody
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        store = RedisStorage("127.0.0.1", port)
        for request in (lambda: store.put("k", b"1"), lambda: store.get("k"), lambda: store.list("")):
            with pytest.raises(StorageBusy, match=f"redis://127.0.0.1:{port}/0.*refused.*See that a server runs there"):
                request()


def test_a_policy_is_looked_at_once_the_server_answers(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "x", "--maxmemory-policy", "allkeys-lfu") as port:
        client = redis.Redis(port=port, password="x")
        client.config_set("requirepass", "")
        client.config_set("maxclients", "1")
        store = RedisStorage("127.0.0.1", port)  # to which the server does not talk yet
        with pytest.raises(StorageBusy):
            store.put("k", b"1")
        client.config_set("maxclients", "10")
        with pytest.raises(PlatformRefused, match="allkeys-lfu"):
            store.put("k", b"1")


def test_connections_that_were_lost_are_made_again(port: int) -> None:
    store = open_storage(f"redis://127.0.0.1:{port}?prefix={secrets.token_hex(8)}")
    store.put("k", b"1")
    for _ in range(3):
        redis.Redis(port=port).client_kill_filter(_type="normal", skipme=True)
        assert store.get("k") == b"1"
        store.put("k", b"1")


def test_an_answer_that_is_an_error_leaves_the_connection_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_server(tmp_path) as port:
        admin = redis.Redis(port=port)
        admin.set("open/k", b"value")
        admin.set("closed/k", b"secret")
        monkeypatch.setenv("REDIS_USERNAME", "worker")
        monkeypatch.setenv("REDIS_PASSWORD", "pw")
        rights = ["~open/*", "+@read", "+@write", "+@connection", "+info"]
        make_user(admin, rights)
        store = RedisStorage("127.0.0.1", port)
        for _ in range(2):
            with pytest.raises(PlatformRefused, match="keys of the prefix"):
                store.get("closed/k")
            assert store.get("open/k", start=1, stop=3) == b"al"
        admin.rpush("open/list", b"1")
        with pytest.raises(StorageError, match="WRONGTYPE"):
            store.get("open/list")
        assert store.get("open/k") == b"value"


def test_a_user_who_may_not_ask_for_the_policy_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server(tmp_path) as port:
        rights = ["~*", "+@all", "-info"]
        make_user(redis.Redis(port=port), rights)
        monkeypatch.setenv("REDIS_USERNAME", "worker")
        monkeypatch.setenv("REDIS_PASSWORD", "pw")
        with caplog.at_level(logging.WARNING):
            store = RedisStorage("127.0.0.1", port)
        assert "make sure that maxmemory-policy is noeviction" in caplog.text
        store.put("k", b"1")
        assert store.get("k") == b"1"


def make_user(admin: redis.Redis, rights: list[str]) -> None:
    admin.execute_command("ACL", "SETUSER", "worker", "on", ">pw", *rights)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("prefix", ["a*", "a?", "[a]", "a]", "a\\", "^-", "{a}", "é"])
def test_prefixes_are_no_patterns(port: int, prefix: str) -> None:
    store = RedisStorage("127.0.0.1", port, prefix=f"{secrets.token_hex(4)}[x]*")
    for key in (f"{prefix}1", f"{prefix}/2", "a1", "ab1", "a", "b"):
        store.put(key, b"")
    keys = {f"{prefix}1", f"{prefix}/2", "a1", "ab1", "a", "b"}
    assert store.list(prefix) == tuple(sorted(key for key in keys if key.startswith(prefix)))


def test_a_long_list_is_whole_and_other_keys_of_the_server_are_not_in_it(port: int, store: Storage) -> None:
    admin = redis.Redis(port=port)
    names = [f"run/{number:05d}" for number in range(3000)]
    prefix = store._prefix  # type: ignore[attr-defined]
    admin.mset({f"{prefix}{name}": b"" for name in names} | {f"others/{name}": b"" for name in names})
    assert store.list("run/") == tuple(names)
    store.delete_many(names)
    assert store.list("") == ()


def test_an_empty_part_of_an_object_is_told_from_a_missing_one(store: Storage) -> None:
    store.put("k", b"abc")
    assert store.get("k", start=3) == store.get("k", start=7, stop=9) == store.get("k", start=0, stop=0) == b""
    for start, stop in ((3, None), (7, 9), (0, 0), (-2, None)):
        with pytest.raises(KeyMissing):
            store.get("none", start=start, stop=stop)


def test_tls_is_spoken_and_the_certificate_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = self_signed(tmp_path)
    options = ("--port", "0", "--tls-cert-file", certificate, "--tls-key-file", key, "--tls-auth-clients", "no")
    with redis_server(tmp_path, *options, port_setting="--tls-port") as port:
        with pytest.raises(PlatformRefused, match="set SSL_CERT_FILE"):
            open_storage(f"rediss://127.0.0.1:{port}")
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        store = open_storage(f"rediss://127.0.0.1:{port}")
        body = bytes(range(256)) * 10_000
        store.put("k", body)
        assert store.get("k") == body


def self_signed(folder: Path) -> tuple[str, str]:
    """The paths of a certificate for this machine and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "funcpipe-test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(folder / "certificate.pem"), str(folder / "key.pem")
