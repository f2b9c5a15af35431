"""What a node gives to others and takes from them: always the bytes of the storage, whatever a node answers."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore import Checkpoint, CheckpointDamaged, CheckpointStore, InvalidInput, StorageUnavailable, open_store
from ckptstore.config import CacheConfig, PeerConfig, StoreConfig
from ckptstore.events import Event, PeerLeftOut, listening
from ckptstore.extensions.peers import nodes
from ckptstore.extensions.peers.channel import AUTHENTICATED_BYTES, Channel, token_keys
from ckptstore.extensions.peers.extents import Extents
from ckptstore.extensions.peers.line_client import LineClient
from ckptstore.extensions.peers.line_server import LineServer
from ckptstore.extensions.peers.nodes import find_nodes, parse_peers
from ckptstore.extensions.peers.peer_server import GROUP
from ckptstore.extensions.peers.peers import Peers
from ckptstore.extensions.publication.subscription import Subscription
from ckptstore.format.digest import Digest
from ckptstore.node_cache.place import open_place
from ckptstore.node_cache.readers import excluding_readers
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3_server import Fault, S3Server, s3_server
from ckptstore.transfer.moves import EXTENT_BYTES

TOKEN = "a token of sixteen characters"
URI = "s3://test/run é/first"
BIG_BYTES = 2 * EXTENT_BYTES + 4097
FILES = {"big.bin": random.Random(0).randbytes(BIG_BYTES)} | {
    f"small/{number}.bin": random.Random(number).randbytes(number * 3000) for number in range(30)
}
TOTAL_BYTES = sum(map(len, FILES.values()))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server with a store of one checkpoint of files, and a store of a state."""
    source = tmp_path_factory.mktemp("source")
    for name, data in FILES.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(data)
    with s3_server(buckets=["test"]) as server:
        for uri in (URI, f"{URI}2"):
            with open_store(uri, storage_options=server.storage_options) as store:
                store.save_directory(1, str(source))
        with open_store("s3://test/state", storage_options=server.storage_options) as store:
            store.save(1, {"w": weights()})
        yield server


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_PEERS_TOKEN", TOKEN)
    monkeypatch.setenv("CKPTSTORE_PEERS_TIMEOUT_SECONDS", "5")


def weights() -> torch.Tensor:
    return torch.arange(5 << 20, dtype=torch.float32)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def opened(server: S3Server, peers: str | None, uri: str = URI) -> CheckpointStore:
    return open_store(uri, storage_options=server.storage_options, peers=peers, group="solo")


def bucket_bytes(server: S3Server, since: int) -> int:
    """The bytes of files, without what an empty store would cost."""
    return sum(request.sent_bytes for request in server.log[since:] if "ckptstore.json" not in request.path)


def check_files(directory: Path) -> None:
    for name, data in FILES.items():
        assert (directory / name).read_bytes() == data, name


Answer = Callable[["Strange", Channel, Mapping[str, Any]], None]


class Strange(LineServer):
    """A node that knows the token, and answers as a test says."""

    serves = "anything"

    def __init__(self, answer: Answer, token: str = TOKEN) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.replies, self.num_requests = answer, 0
        super().__init__(listener, token_keys(token), node=GROUP, timeout_seconds=5)

    def answer(self, channel: Channel, request: Mapping[str, Any]) -> None:
        self.num_requests += 1
        self.replies(self, channel, request)

    def peers(self) -> str:
        return f"127.0.0.1:{self.port},127.0.0.1:{free_port()}"


@pytest.fixture
def strange() -> Iterator[Callable[..., Strange]]:
    made: list[Strange] = []

    def make(answer: Answer, token: str = TOKEN) -> Strange:
        made.append(Strange(answer, token))
        return made[-1]

    yield make
    for one in made:
        one.close()


def give(channel: Channel, data: bytes, **fields: Any) -> None:
    channel.send({"size_bytes": len(data), "digest": str(Digest.of(data))} | fields)
    channel.line.sendall(data)
    if len(data) <= AUTHENTICATED_BYTES:
        channel.prove([memoryview(data)])


def lies(self: Strange, channel: Channel, request: Mapping[str, Any]) -> None:
    give(channel, bytes(request["size_bytes"]))


def wrong_digest(self: Strange, channel: Channel, request: Mapping[str, Any]) -> None:
    give(channel, bytes(request["size_bytes"]), digest=str(Digest.of(b"x")))


def closes(self: Strange, channel: Channel, request: Mapping[str, Any]) -> None:
    raise ConnectionAbortedError


def waits_for_ever(self: Strange, channel: Channel, request: Mapping[str, Any]) -> None:
    while True:
        channel.send({"wait": True})
        time.sleep(0.05)


def drips(self: Strange, channel: Channel, request: Mapping[str, Any]) -> None:
    channel.send({"size_bytes": request["size_bytes"], "digest": ""})
    while True:
        channel.line.sendall(b"x")
        time.sleep(0.05)


STRANGE: dict[str, Answer] = {
    **{answer.__name__: answer for answer in (lies, wrong_digest, closes, waits_for_ever, drips)},
    "odd_digest": lambda _, channel, asked: give(channel, bytes(asked["size_bytes"]), digest={"md5": 1}),
    "too_short": lambda _, channel, asked: give(channel, bytes(asked["size_bytes"] // 2)),
    "shorter_than_said": lambda _, channel, asked: give(
        channel, bytes(asked["size_bytes"] - 1), size_bytes=asked["size_bytes"]
    ),
    "says_nothing": lambda _, channel, asked: time.sleep(2),
    "raises": lambda _, channel, asked: channel.send({"error": 5}),
    "says_what_nobody_means": lambda _, channel, asked: channel.send({"hello": [1]}),
    "sends_no_message": lambda _, channel, asked: channel.line.sendall(b"\2\0\0\0" + b"[" * 100),
}


@pytest.mark.parametrize("answer", STRANGE.values(), ids=STRANGE.keys())
def test_whatever_a_peer_answers_the_files_are_right(
    server: S3Server, strange: Callable[..., Strange], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    is_silent = answer in (waits_for_ever, drips, STRANGE["says_nothing"])
    monkeypatch.setenv("CKPTSTORE_PEERS_TIMEOUT_SECONDS", "1" if is_silent else "5")
    events: list[Event] = []
    other = strange(answer)
    with listening(events.append), opened(server, other.peers()) as store:
        store.latest().to_directory(tmp_path / "out")
    check_files(tmp_path / "out")
    assert other.num_requests > 0, "it was asked"
    left_out = [event for event in events if isinstance(event, PeerLeftOut)]
    assert {event.node for event in left_out} == {f"127.0.0.1:{other.port}"}
    assert (left_out[-1].seconds == 600) == (answer is lies)


@pytest.mark.parametrize("answer", [lies, wrong_digest, closes], ids=lambda answer: answer.__name__)
def test_whatever_a_peer_answers_the_state_is_right(
    server: S3Server, strange: Callable[..., Strange], answer: Answer
) -> None:
    other = strange(answer)
    while not other.num_requests:  # it owns some extents, with most ports
        state = {"w": torch.zeros_like(weights())}
        with opened(server, other.peers(), "s3://test/state") as store:
            store.resume(state)
        assert torch.equal(state["w"], weights())


def test_of_the_owners_of_a_large_file_the_liar_alone_is_left_out(
    server: S3Server, strange: Callable[..., Strange], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has one digest for all its extents, so a second owner is asked for each."""
    monkeypatch.setenv("CKPTSTORE_PEERS_LINGER_SECONDS", "0")
    with opened(server, None) as store:
        uri = store[1].uri

    def right(self: Strange, channel: Channel, request: Mapping[str, Any]) -> None:
        name, offset = str(request["file"]).rpartition("/")[2], request["offset"]
        give(channel, FILES[name][offset : offset + request["size_bytes"]])

    honest, liar, events = strange(right), strange(lies), list[Event]()
    turns: set[int] = set()
    while turns != {0, 1}:  # it owns an extent, and is the second owner of one, with some ports
        liar.close()
        liar = strange(lies)
        text = f"127.0.0.1:{liar.port},127.0.0.1:{honest.port},127.0.0.1:{free_port()}"
        peers, turns = peers_of(text), set()
        for index in range(3):
            first = peers._owner(f"{uri}/big.bin", index)
            assert first is not None
            second = peers._owner(f"{uri}/big.bin", index, {first.name})
            turns |= {turn for turn, node in enumerate((first, second)) if node and node.name.endswith(f":{liar.port}")}
        peers.close()
    since = len(server.log)
    with listening(events.append), opened(server, text) as store:
        store.latest().to_directory(tmp_path / "out", include="big.bin")
    assert (tmp_path / "out/big.bin").read_bytes() == FILES["big.bin"]
    assert honest.num_requests > 0
    left_out = {(event.node, event.seconds) for event in events if isinstance(event, PeerLeftOut)}
    assert left_out == {(f"127.0.0.1:{liar.port}", 600)}
    sent = sum(request.sent_bytes for request in server.log[since:] if "big.bin" in request.path)
    assert sent <= BIG_BYTES, "what two nodes gave alike is not read from the bucket"


def test_a_peer_that_does_not_read_the_store_is_no_trouble(
    server: S3Server, strange: Callable[..., Strange], tmp_path: Path
) -> None:
    events: list[Event] = []
    other = strange(lambda self, channel, request: channel.send({"no": "elsewhere"}))
    with listening(events.append), opened(server, other.peers()) as store:
        store.latest().to_directory(tmp_path / "out")
    check_files(tmp_path / "out")
    assert not [event for event in events if isinstance(event, PeerLeftOut)]


def test_a_peer_with_another_token_is_not_believed(
    server: S3Server, strange: Callable[..., Strange], tmp_path: Path
) -> None:
    other = strange(lies, "another token of many characters")
    with opened(server, other.peers()) as store:
        store.latest().to_directory(tmp_path / "out")
    check_files(tmp_path / "out")
    assert other.num_requests == 0


def test_peers_that_are_not_there_cost_nothing_but_a_warning(server: S3Server, tmp_path: Path) -> None:
    events: list[Event] = []
    peers = f"127.0.0.1:{free_port()},nowhere.invalid:{free_port()},[2001:db8::1]:{free_port()}"
    with listening(events.append), opened(server, peers) as store:
        store.latest().to_directory(tmp_path / "out")
    check_files(tmp_path / "out")
    assert any(isinstance(event, PeerLeftOut) and "nowhere.invalid" in event.node for event in events)


def test_what_is_damaged_in_the_bucket_is_called_so_and_no_peer_is_blamed(
    server: S3Server, strange: Callable[..., Strange], tmp_path: Path
) -> None:
    """A peer that read the same damaged file is right."""
    uri = "s3://test/damaged"
    (tmp_path / "source").mkdir()
    (tmp_path / "source/one.bin").write_bytes(b"as it should be")
    with opened(server, None, uri) as store:
        checkpoint = store.save_directory(1, str(tmp_path / "source"))
        assert checkpoint is not None
        key = f"{checkpoint.uri.removeprefix(uri + '/')}/one.bin"
    storage = open_storage(uri, storage_options=server.storage_options)
    storage.write(key, [memoryview(b"as it shOuld be")])
    storage.close()
    events: list[Event] = []
    other = strange(lambda self, channel, request: give(channel, b"as it shOuld be"))
    while not other.num_requests:  # it owns the file, with every second port
        with (
            listening(events.append),
            opened(server, other.peers(), uri) as store,
            pytest.raises(CheckpointDamaged, match=r"one\.bin is damaged"),
        ):
            store.latest().to_directory(tmp_path / "out")
    assert not [event for event in events if isinstance(event, PeerLeftOut)]


def test_a_bit_that_flips_on_the_way_to_the_owner_is_found(
    server: S3Server, strange: Callable[..., Strange], tmp_path: Path
) -> None:
    name, is_owner, turn = "small/7.bin", False, 0
    while not is_owner:
        other = strange(lambda self, channel, request: channel.send({"no": "elsewhere"}))
        with opened(server, other.peers()) as store:
            checkpoint, since = store.latest(), len(server.log)
            server.faults.add(Fault(action="corrupt", match=name))
            requests = []
            for _ in range(3):
                checkpoint.to_directory(tmp_path / f"{turn}", include=name)
                assert (tmp_path / f"{turn}" / name).read_bytes() == FILES[name]
                requests.append(sum(name in request.path for request in server.log[since:]))
                turn += 1
        is_owner = other.num_requests <= 1  # as the second owner, when the bytes were wrong
        assert server.faults.pending == 0
    assert requests == [2, 3, 3], "what was wrong is forgotten, and what is right kept"


def test_a_check_reads_the_bucket_and_no_memory(server: S3Server, tmp_path: Path) -> None:
    peers = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with opened(server, peers) as store:
        checkpoint = store.latest()
        checkpoint.to_directory(tmp_path / "out")
        since = len(server.log)
        assert checkpoint.verify().ok
        assert bucket_bytes(server, since) >= TOTAL_BYTES


def test_one_node_alone_serves_nobody_and_asks_nobody(server: S3Server, tmp_path: Path) -> None:
    with opened(server, f"127.0.0.1:{free_port()}") as store:
        since = len(server.log)
        store.latest().to_directory(tmp_path / "out")
        one = len(server.log) - since
    with opened(server, None) as store:
        since = len(server.log)
        store.latest().to_directory(tmp_path / "other")
        assert len(server.log) - since == one


@pytest.fixture
def asking(server: S3Server) -> Iterator[tuple[Checkpoint, Callable[..., dict[str, Any]]]]:
    """A checkpoint of a node, and what it answers."""
    port = free_port()
    with opened(server, f"127.0.0.1:{port},127.0.0.1:{free_port()}") as store:
        client = LineClient(GROUP, [("127.0.0.1", port)], token_keys(TOKEN), timeout_seconds=20)

        def ask(file: Any, offset: Any = 0, size_bytes: Any = 100) -> dict[str, Any]:
            def talk(channel: Channel) -> dict[str, Any]:
                channel.send({"file": file, "offset": offset, "size_bytes": size_bytes})
                while (reply := channel.receive()).get("wait"):
                    pass
                if "no" not in reply:
                    data = bytearray(channel.line.recv(size_bytes, socket.MSG_WAITALL))
                    channel.check([memoryview(data)])
                    reply["data"] = bytes(data)
                return reply

            return client.talk("it", talk)

        yield store.latest(), ask
        client.close()


def test_a_node_gives_files_of_attempts_below_its_own_stores_alone(server: S3Server, asking: Any) -> None:
    checkpoint, ask = asking
    assert ask(f"{checkpoint.uri}/big.bin", 7)["data"] == FILES["big.bin"][7:107]
    since = len(server.log)
    directory = checkpoint.uri.removeprefix(URI)
    for file in (
        f"{URI}2{directory}/big.bin",
        f"{URI}/../{URI.rpartition('/')[2]}2{directory}/big.bin",
        f"{URI}/checkpoints/../store.json",
        f"{checkpoint.uri}/../../log/0000000001.json",
        f"{checkpoint.uri}/../../checkpoints/step-0000000001-e0001-00000000/../../log/0000000001.json",
        f"{URI}/log/0000000001.json",
        f"{URI}/store.json",
        f"{checkpoint.uri}//big.bin",
        f"{checkpoint.uri}/",
        f"{checkpoint.uri}",
        f"{checkpoint.uri}/big.bin\0",
        "/etc/passwd",
        "file:///etc/passwd",
        "",
        {"a": 1},
    ):
        assert ask(file)["no"] == "this node does not read that", file
    for offset, size_bytes in ((-1, 10), (0, 0), (0, -5), (0, EXTENT_BYTES + 1), (EXTENT_BYTES - 1, 2)):
        assert "no" in ask(f"{checkpoint.uri}/big.bin", offset, size_bytes)
    assert len(server.log) == since, "the bucket was not asked"
    assert "no" in ask(f"{checkpoint.uri}/missing.bin")
    assert "no" in ask(f"{checkpoint.uri}/big.bin", BIG_BYTES - 10, 20)
    for offset in ("x", None):
        with pytest.raises((StorageUnavailable, OSError)):
            ask(f"{checkpoint.uri}/big.bin", offset)
    assert ask(f"{checkpoint.uri}/big.bin", 7)["data"] == FILES["big.bin"][7:107], "it goes on"


def test_a_node_that_cannot_prove_the_token_gets_nothing(server: S3Server, asking: Any) -> None:
    port = free_port()
    with opened(server, f"127.0.0.1:{port},127.0.0.1:{free_port()}"):
        stranger = LineClient(GROUP, [("127.0.0.1", port)], token_keys("another"), timeout_seconds=5)
        with pytest.raises(StorageUnavailable, match="cannot be reached"):
            stranger.talk("it", lambda channel: {})
        older = LineClient("peer/0", [("127.0.0.1", port)], token_keys(TOKEN), timeout_seconds=5)
        with pytest.raises(StorageUnavailable, match="cannot be reached"):
            older.talk("it", lambda channel: {})
        with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
            line.sendall((4000).to_bytes(4, "little") + b"[" * 4000)
            assert line.recv(1) == b""


def never_ends(line: socket.socket) -> None:
    line.sendall((4000).to_bytes(4, "little") + b"[" * 4000)


def trickles(line: socket.socket) -> None:
    line.sendall((4000).to_bytes(4, "little"))
    for _ in range(60):
        line.sendall(b" ")
        time.sleep(0.05)


def has_odd_characters(line: socket.socket) -> None:
    greeting = '{"nonce": "1", "proof": "é"}'.encode()
    line.sendall(len(greeting).to_bytes(4, "little") + greeting)


@pytest.mark.parametrize(
    ("speak", "reason"),
    [(never_ends, "too deeply"), (trickles, "timed out"), (has_odd_characters, "does not have the key of the job")],
)
def test_whoever_greets_in_another_way_is_no_peer(speak: Callable[[socket.socket], None], reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            line, _ = listener.accept()
            with line, suppress(OSError):
                speak(line)
                line.recv(1000)

        threading.Thread(target=greet, daemon=True).start()
        client = LineClient(GROUP, [listener.getsockname()[:2]], token_keys(TOKEN), timeout_seconds=0.5)
        with pytest.raises(StorageUnavailable, match=reason):
            client.talk("it", lambda channel: {})


def test_each_extent_is_read_once_however_many_ask(server: S3Server, asking: Any) -> None:
    checkpoint, ask = asking
    since = len(server.log)
    server.faults.add(Fault(action="delay", match="big.bin", seconds=0.3))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: ask(f"{checkpoint.uri}/big.bin", 0, 5000)["data"], range(8)))
    assert found == [FILES["big.bin"][:5000]] * 8
    assert ask(f"{checkpoint.uri}/big.bin", 100, 50)["data"] == FILES["big.bin"][100:150]
    assert len(server.log) - since == 1


def test_a_child_leaves_the_port_to_its_parent(server: S3Server) -> None:
    port = free_port()
    with opened(server, f"127.0.0.1:{port},127.0.0.1:{free_port()}"):
        child = os.fork()
        if not child:  # it would keep the port if its parent were killed
            os._exit(int(port in ports_of_this_process()))
        assert port in ports_of_this_process()
        assert os.waitpid(child, 0)[1] == 0


def ports_of_this_process() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family == socket.AF_INET:
                found.add(one.getsockname()[1])
    return found


def test_stores_of_a_process_share_a_port_and_the_last_one_closes_it(server: S3Server) -> None:
    port = free_port()
    peers = f"127.0.0.1:{port},127.0.0.1:{free_port()}"
    with opened(server, peers):
        with opened(server, peers, "s3://test/state"):
            pass
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
    socket.create_server(("127.0.0.1", port)).close()
    with opened(server, peers), pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))


def test_a_store_that_is_closed_serves_as_long_as_others_ask(server: S3Server) -> None:
    port, done = free_port(), threading.Event()
    store = opened(server, f"127.0.0.1:{port},127.0.0.1:{free_port()}")
    client = LineClient(GROUP, [("127.0.0.1", port)], token_keys(TOKEN), timeout_seconds=20)
    file = f"{store.latest().uri}/big.bin"

    def ask(channel: Channel) -> dict[str, Any]:
        channel.send({"file": file, "offset": 0, "size_bytes": 0})
        return channel.receive()

    client.talk("it", ask)
    threading.Thread(target=lambda: (store.close(), done.set())).start()
    for _ in range(8):
        assert client.talk("it", ask) == {"no": "this node does not read that"}
        assert not done.wait(0.2)
    assert done.wait(10)
    client.close()


@pytest.fixture
def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_PEERS_CACHE_BYTES", "1")


@pytest.mark.usefixtures("_no_memory")
def test_a_finished_copy_on_the_disk_is_served_as_long_as_it_exists(
    server: S3Server, asking: tuple[Checkpoint, Callable[..., dict[str, Any]]], tmp_path: Path
) -> None:
    (checkpoint, ask), cache = asking, open_place(CacheConfig.from_env().cache_dir)

    def bucket_has_sent(offset: int = EXTENT_BYTES) -> int:
        since = len(server.log)
        assert ask(f"{checkpoint.uri}/big.bin", offset, 100)["data"] == FILES["big.bin"][offset : offset + 100]
        return bucket_bytes(server, since)

    assert bucket_has_sent() == 100
    with checkpoint.as_directory() as path:
        assert bucket_has_sent() == 0
    assert bucket_has_sent() == 0, "nobody reads the copy, and it is still there"
    with excluding_readers(cache, path.name) as is_unread:
        assert is_unread, "a request holds the lease while it reads, and no longer"
        assert bucket_has_sent() == 100, "it is being removed"
    assert bucket_has_sent() == 0
    (path / "big.bin").chmod(0o600)
    (path / "big.bin").write_bytes(FILES["big.bin"][: EXTENT_BYTES + 50])
    assert bucket_has_sent() == 100, "it is too short"
    (path / "big.bin").unlink()
    assert bucket_has_sent() == 100, "it has vanished"
    path.rename(tmp_path / "elsewhere")
    assert bucket_has_sent() == 100
    with checkpoint.as_directory():
        assert bucket_has_sent() == 0, "it is back"


def test_extents_keep_what_was_used_last_and_no_failure() -> None:
    extents, reads = Extents(250, 4), []

    def read(offset: int, data: memoryview) -> None:
        reads.append((offset, len(data)))
        if len(reads) == 1:
            raise StorageUnavailable("not now")

    def get(file: str, offset: int, size_bytes: int) -> Any:
        return extents.get(file, offset, size_bytes, read, inline=True)

    assert get("a", 0, 100).failure == "not now"
    assert get("a", 0, 100).data is not None
    get("b", EXTENT_BYTES, 100)
    get("a", 50, 50)  # in memory
    assert len(reads) == 3
    get("c", 0, 100)  # b goes
    get("a", 0, 100)
    assert len(reads) == 4
    get("b", EXTENT_BYTES, 100)
    assert len(reads) == 5
    extents.forget("b", EXTENT_BYTES + 5)
    get("b", EXTENT_BYTES, 100)
    assert len(reads) == 6
    get("d", 0, 1000)  # more than all
    get("d", 0, 1000)
    assert len(reads) == 8


def peers_of(text: str, **options: Any) -> Peers:
    config = PeerConfig(peers=text, peers_token=TOKEN, **options)
    return Peers(open_storage("s3://test/x", storage_options={"key": "k", "secret": "s"}), config, num_reads=2)


def test_nodes_begin_with_their_own_extents_and_together_read_all() -> None:
    ports = [free_port() for _ in range(4)]
    text = ",".join(f"127.0.0.1:{port}" for port in ports)
    name = "checkpoints/step-0000000001-e0001-00000000/model"
    stretches = [(name, number * EXTENT_BYTES, EXTENT_BYTES) for number in range(400)]
    firsts, taken = set[int](), []
    for _ in ports:
        peers = peers_of(text, peers_cache_bytes=400 * EXTENT_BYTES)
        order = peers.order(stretches)
        assert sorted(order) == list(range(400))
        firsts.update(order[:60])
        peers.close()
        taken.append(socket.create_server(("127.0.0.1", ports[len(taken)])))
    assert len(firsts) == 240, "each begins with others"
    peers = peers_of(text, peers_cache_bytes=5 * EXTENT_BYTES)
    order = peers.order(stretches)
    assert all(abs(place - number) < 10 for place, number in enumerate(order)), "in windows"
    assert sorted(order) == list(range(400))
    peers.close()
    for one in taken:
        one.close()


@pytest.mark.parametrize(
    "text", ["host", "host:", "host:0", "host:65536", ":7", "a:1,,b:2", "a:1,a:1", "http://a:1", "a b:1", "::1:7"]
)
def test_peers_that_cannot_be_meant_are_refused(server: S3Server, text: str) -> None:
    with pytest.raises(InvalidInput, match="peers"):
        opened(server, text)


def test_peers_are_parsed_and_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_peers("a:1, [fd00::1]:2 ,b.c-d:3") == (("a", 1), ("fd00::1", 2), ("b.c-d", 3))
    addresses = {"all": ["10.0.0.2", "10.0.0.1", "fd00::1"], "six": ["fd00::2", "fd00::1"], "gone": []}

    def found(host: str, port: int, **_: Any) -> list[Any]:
        if not addresses.get(host, [host]):
            raise socket.gaierror
        return [(0, 0, 0, "", (address, port)) for address in addresses.get(host, [host])]

    monkeypatch.setattr(nodes.socket, "getaddrinfo", found)
    assert [node.name for node in find_nodes((("all", 7),))] == ["10.0.0.1:7", "10.0.0.2:7"]
    assert [node.name for node in find_nodes((("six", 7),))] == ["[fd00::1]:7", "[fd00::2]:7"]
    assert find_nodes((("gone", 7),)) == []
    both = find_nodes((("all", 7), ("gone", 8)))
    assert [(node.name, len(node.addresses)) for node in both] == [("all:7", 3), ("gone:8", 0)]


def test_own_addresses_are_known() -> None:
    (local,) = find_nodes((("127.0.0.1", 7),))
    assert local.own_addresses == [("127.0.0.1", 7)]
    assert nodes.PeerNode("node1:7", (("127.0.1.1", 7),)).own_addresses == [("", 7)], "as Debian has it"
    assert nodes.PeerNode("b:7", (("192.0.2.1", 7),)).own_addresses == []


def test_a_token_is_needed_and_never_shown(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TOKEN not in repr(StoreConfig.from_env())
    monkeypatch.setenv("CKPTSTORE_PEERS_TOKEN", "short")
    with pytest.raises(InvalidInput, match="peers_token has 5 characters") as caught:
        opened(server, "a:1,b:2")
    assert "openssl" in str(caught.value.hint)
    monkeypatch.delenv("CKPTSTORE_PEERS_TOKEN")
    with pytest.raises(InvalidInput, match="peers_token has 0 characters"):
        opened(server, "a:1,b:2")


def test_peers_of_the_call_need_a_server_and_those_of_the_environment_wait_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for uri in (str(tmp_path / "store"), "memory://peers"):
        with pytest.raises(InvalidInput, match="no server"):
            open_store(uri, peers="127.0.0.1:7,127.0.0.1:8")
    with pytest.raises(InvalidInput, match="no server"):
        Subscription(tmp_path / "store", tmp_path / "out", peers="127.0.0.1:7,127.0.0.1:8")
    monkeypatch.setenv("CKPTSTORE_PEERS", "127.0.0.1:7,127.0.0.1:8")
    open_store(tmp_path / "store").close()
