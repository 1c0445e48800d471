"""Folders that their process holds while it lives: the next start clears what nobody holds, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from launch.running import launch, program
from shardwise.launch import ranks
from shardwise.launch.owned import LOCK, OwnedFolder, clear_unowned
from shardwise.spec.errors import SpecError
from training.faults import small_disk

HOLDER = """
import sys
from pathlib import Path
from shardwise.launch.owned import OwnedFolder

folder = OwnedFolder("rendezvous", Path(sys.argv[1]))
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_leaves_is_cleared_and_what_a_living_one_holds_is_not(tmp_path: Path) -> None:
    command = [*program(tmp_path, HOLDER, preface=""), str(tmp_path)]
    holders = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = []
    for holder in holders:
        assert holder.stdout is not None
        paths.append(Path(holder.stdout.readline().strip()))
    (paths[0] / "store").write_text("what ranks said")
    holders[0].send_signal(signal.SIGKILL)
    holders[0].wait()
    others = [tmp_path / "shardwise-0", tmp_path / "shardwise-mine", tmp_path / "another"]
    for one in others:
        one.mkdir()
    assert paths[0].is_dir()  # nobody was left to remove it
    with OwnedFolder("pool", tmp_path) as own:
        assert not paths[0].exists()
        assert paths[1].is_dir()
        clear_unowned(tmp_path)
        assert own.is_dir()
    assert not own.exists()
    assert all(one.is_dir() for one in others)
    holders[1].communicate("")
    assert holders[1].returncode == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_another_users_folder_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "shardwise-rendezvous-theirs"
    theirs.mkdir()
    (theirs / LOCK).touch()
    os.chown(theirs, 12_345, 12_345)
    clear_unowned(tmp_path)
    assert theirs.is_dir()


def test_ranks_leave_no_rendezvous_and_without_room_for_one_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    with small_disk(memory, "size=2m"):
        monkeypatch.setattr(ranks, "_SHARED_MEMORY", memory)
        found = launch(tmp_path, "print(place.rendezvous)")
        assert (found.status, list(memory.iterdir())) == (0, [])
        assert str(memory) in (found.attempts[0].folder / "rank-0.log").read_text()
        (memory / "large").write_bytes(bytes(3 * 2**19))
        with pytest.raises(
            SpecError, match="memory: has no space left: the processes of a run rendezvous there; free some"
        ):
            launch(tmp_path, "print(place.rendezvous)")
        assert [one.name for one in memory.iterdir()] == ["large"]


def test_a_launcher_and_its_guard_that_are_killed_leave_a_rendezvous_for_the_next_start(tmp_path: Path) -> None:
    """As `pkill -9 -f shardwise` does."""
    body = f"""
import sys
from pathlib import Path
from shardwise.launch import ranks
ranks._SHARED_MEMORY = Path({str(tmp_path)!r})
gang, folder = ranks.Gang.all_here(1), Path({str(tmp_path)!r})
one = ranks.RankProcesses([sys.executable, "-c", "import time; time.sleep(1000)"], gang, folder, {{}})
print(one._guard.pid, one.all[0].process.pid, one._rendezvous.path, flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        program(tmp_path, body, preface=""), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    guard, rank, rendezvous = process.stdout.readline().split()
    os.kill(int(guard), signal.SIGKILL)
    process.kill()
    process.wait()
    os.kill(int(rank), signal.SIGKILL)
    assert Path(rendezvous).is_dir()
    clear_unowned(tmp_path)
    assert not Path(rendezvous).exists()


def test_closing_twice_closes_nobody_elses_file(tmp_path: Path) -> None:
    owned = OwnedFolder("pool", tmp_path)
    owned.close()
    others = [os.open(tmp_path, os.O_RDONLY) for _ in range(3)]  # one of them has the lock's number
    owned.close()
    for other in others:
        os.close(other)
