"""Who writes to a file is seen, whoever that is and whatever it calls the file."""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptstore.tools.run.folders import Folder, JobSeen, Rules
from ckptstore.tools.run.folders.open_files import open_files

RULES = Rules(patterns=("step_{step}",), marker="done")


@contextmanager
def daemon(text: str, *words: object) -> Iterator[None]:
    """A process in a session of its own whose parent has ended; it has run the text, and waits; it is gone after."""
    text = f"import mmap, os, sys\nif os.fork(): os._exit(0)\nos.setsid()\n{text}\nprint(os.getpid(), flush=True)\n"
    text += "sys.stdin.read()"
    command = [sys.executable, "-c", text, *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert os.getsid(pid) == pid
        process_fd = os.pidfd_open(pid)  # it is nobody's child: nobody else can wait for it
        try:
            yield
            process.stdin.close()
            assert select.select([process_fd], [], [], 60)[0], "the daemon has not ended"
        finally:
            os.close(process_fd)


@pytest.mark.parametrize(
    ("how", "is_open"),
    [
        ("file = open(sys.argv[1], 'ab')", True),
        ("kept = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0); os.closerange(3, 99)", True),
        ("kept = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0, mmap.MAP_PRIVATE); os.closerange(3, 99)", False),
        ("file = open(sys.argv[1], 'rb')", False),
        ("os.link(sys.argv[1], sys.argv[1] + '.second'); file = open(sys.argv[1] + '.second', 'ab')", True),
        ("os.link(sys.argv[1], sys.argv[2] + '/x'); file = open(sys.argv[2] + '/x', 'ab'); os.unlink(file.name)", True),
    ],
)
def test_a_writer_that_has_left_the_family_is_seen(tmp_path: Path, how: str, is_open: bool) -> None:
    (tmp_path / "out/step_1").mkdir(parents=True)
    names = ["step_1/a.bin", "step_1/b.bin"]
    for name in names:
        (tmp_path / "out" / name).write_bytes(b"half")
    with daemon(how, tmp_path / "out" / names[0], tmp_path):
        assert open_files(tmp_path / "out", names).opened == frozenset(names[:is_open])
        assert open_files(tmp_path / "out", [names[0]], readers=True).opened == frozenset(names[:1])
    assert open_files(tmp_path / "out", names, readers=True).opened == frozenset()


def test_a_writer_behind_a_link_is_seen(tmp_path: Path) -> None:
    """A directory outside counts as one of the folder, and its writer knows it under its own name."""
    (tmp_path / "fast/step_1").mkdir(parents=True)
    (tmp_path / "out/step_2").mkdir(parents=True)
    (tmp_path / "out/step_1").symlink_to(tmp_path / "fast/step_1")
    (tmp_path / "out/common.bin").write_bytes(b"half")
    (tmp_path / "fast/step_1/a.bin").write_bytes(b"half")
    (tmp_path / "out/step_2/link.bin").symlink_to(Path("..", "common.bin"))
    for step in (1, 2):
        (tmp_path / f"out/step_{step}/done").touch()
    folder = Folder(tmp_path / "out", RULES)
    writer = "files = [open(name, 'ab') for name in sys.argv[1:]]"
    with daemon(writer, tmp_path / "fast/step_1/a.bin", tmp_path / "out/common.bin"):
        folder.look(JobSeen(frozenset()))
        look = folder.look(JobSeen(frozenset()))
        assert look.unfinished == {"step_1": "a.bin is open for writing", "step_2": "link.bin is open for writing"}
    assert [found.name for found in folder.look(JobSeen(frozenset())).finished] == ["step_1", "step_2"]


def test_a_file_that_is_filled_or_replaced_is_waited_for(tmp_path: Path) -> None:
    place = tmp_path / "out/step_1"
    place.mkdir(parents=True)
    folder, job = Folder(tmp_path / "out", RULES), JobSeen(frozenset())
    with (place / "a.bin").open("wb") as file:
        file.truncate(1 << 20)  # sparse: it has its last size from the start
        (place / "done").touch()
        folder.look(job)
        assert folder.look(job).unfinished == {"step_1": "a.bin is open for writing"}
    with (place / "b.bin").open("w+b") as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), 0)  # Python's keeps a descriptor of its own
    folder.look(job)
    assert folder.look(job).unfinished == {"step_1": "b.bin is open for writing"}
    mapped.close()
    (place / "new").write_bytes(b"new")
    (place / "done").touch()  # it is written last: on a busy machine its time is another one
    folder.look(job)
    (found,) = folder.look(job).finished
    (place / "new").replace(place / "a.bin")
    assert folder.look(job).unfinished == {"step_1": "it has changed since the last look"}
    with pytest.raises(Exception, match="changed after it had been finished"):
        folder.hold(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")
def test_where_writers_are_hidden_time_decides() -> None:
    """The agent is another user than the trainer: /proc says nothing of its files."""
    text = """
import os, sys, time
from ckptstore.tools.run.folders import Folder, JobSeen, Rules
os.setgroups([]); os.setgid(65534); os.setuid(65534)
folder = Folder(sys.argv[1], Rules(patterns=("step_{step}",), marker="done", quiet_seconds=float(sys.argv[2])))
for _ in range(2):
    look = folder.look(JobSeen(frozenset()), notes=False)
print(sorted(look.unfinished.items()), [found.name for found in look.finished])
"""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        for step, user in ((1, 0), (2, 65534)):
            top = Path(place) / f"step_{step}"
            top.mkdir()
            for name in ("a.bin", "done"):
                (top / name).write_bytes(b"1")
                os.chown(top / name, user, user)
        with (Path(place) / "step_1/a.bin").open("ab"):
            said = [
                subprocess.run([sys.executable, "-c", text, place, quiet], capture_output=True, text=True, check=True)
                for quiet in ("3600", "1e-9")
            ]
    assert said[0].stdout.strip() == "[('step_1', 'it has been quiet for 0 of 3600 seconds')] ['step_2']"
    assert said[1].stdout.strip() == "[] ['step_1', 'step_2']"
