"""Units of work: resume, refusal, overwriting, damaged units; every crash point of the file system; ranks."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyses import atomic, store, units
from analyses.distributed import Ranks
from analyses.store import Dataset, Result, Variable
from models.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[2]
WORK = {f"swa-{c}/full w={w}/batch{b}": (c, w, b) for c in (16, 32) for w in (1, 4) for b in range(3)}
CONFIG: dict[str, Any] = {"window": [1, 4], "seed": 7, "checkpoint_sha256": {"swa-16": "aa", "swa-32": "bb"}}


def compute(work: tuple[int, int, int]) -> Dataset:
    rng = np.random.default_rng(work)
    loss = Variable(("sample",), rng.normal(size=5).astype(np.float32), "nats per token", "loss")
    sample = Variable(("sample",), np.arange(5) + 5 * work[2], "1", "index of the text")
    return Dataset({"loss": loss}, {"sample": sample})


def join(parts: dict[str, Dataset]) -> Result:
    groups: dict[str, list[Dataset]] = {}
    for name, dataset in parts.items():
        groups.setdefault(name.rpartition("/")[0], []).append(dataset)
    return Result({name: store.concatenate(datasets, "sample") for name, datasets in groups.items()})


def run(target: Path, config: dict[str, Any] | None = None, work=compute, **options: Any) -> Result:
    settings = {"analysis": "fake", "attributes": {"seed": 7}, **options}
    parts = settings.pop("parts", WORK)
    return units.run_units(parts, work, join, target=target, config=config or CONFIG, **settings)


class Counted:
    """compute that counts its calls and can fail at one of them."""

    def __init__(self, fail_at: int = -1, error: BaseException | None = None) -> None:
        self.calls, self.fail_at, self.error = 0, fail_at, error

    def __call__(self, work: tuple[int, int, int]) -> Dataset:
        if self.calls == self.fail_at and self.error:
            raise self.error
        self.calls += 1
        return compute(work)


def refuse_work(_: Any) -> Dataset:
    raise AssertionError("computed again")


def test_a_run_leaves_only_its_target_with_all_provenance(tmp_path):
    result = run(tmp_path / "r.h5", attributes=lambda: {"seed": 7, "device": "cpu"})
    assert os.listdir(tmp_path) == ["r.h5"]
    assert list(result.groups) == ["swa-16/full w=1", "swa-16/full w=4", "swa-32/full w=1", "swa-32/full w=4"]
    assert result["swa-32/full w=4/sample"].tolist() == list(range(15))
    np.testing.assert_array_equal(result["swa-32/full w=4/loss"][5:10], compute((32, 4, 1))["loss"])
    root = result.attributes
    assert json.loads(root["config"]) == CONFIG
    assert {"analysis", "time", "python", "torch", "numpy", "h5py", "hybridscope", "git_commit", "device"} <= set(root)
    assert len(json.loads(root["unit_environments"])) == 1


def test_an_identical_finished_result_is_given_again_untouched(tmp_path):
    first = run(tmp_path / "r.h5")
    before = (tmp_path / "r.h5").read_bytes()

    def no_attributes() -> dict[str, Any]:
        raise AssertionError

    again = run(tmp_path / "r.h5", work=refuse_work, attributes=no_attributes)
    assert again.digest() == first.digest()
    assert (tmp_path / "r.h5").read_bytes() == before
    assert os.listdir(tmp_path) == ["r.h5"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("bug"), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("at", [0, 1, 7])
def test_an_interrupted_run_computes_only_what_is_missing(tmp_path, stop, at):
    with pytest.raises(type(stop)):
        run(tmp_path / "r.h5", work=Counted(at, stop))
    assert not (tmp_path / "r.h5").exists()
    rest = Counted()
    result = run(tmp_path / "r.h5", work=rest)
    assert rest.calls == len(WORK) - at
    assert result.digest() == run(tmp_path / "whole.h5").digest()


def test_another_configuration_is_refused_by_the_names_of_its_fields(tmp_path):
    run(tmp_path / "r.h5")
    before = (tmp_path / "r.h5").read_bytes()
    for changed, says in (
        (CONFIG | {"seed": 8}, r"seed: 7 stored, 8 asked"),
        (CONFIG | {"checkpoint_sha256": {"swa-16": "aa", "swa-32": "cc"}}, r"swa-32: 'bb' stored, 'cc' asked"),
        (CONFIG | {"sinks": 4}, r"sinks: 'nothing' stored, 4 asked"),
    ):
        with pytest.raises(InputError, match=says) as caught:
            run(tmp_path / "r.h5", changed, work=refuse_work)
        assert "--overwrite" in str(caught.value)
        assert "window" not in str(caught.value)  # only what differs
    with pytest.raises(InputError, match=r"analysis: 'fake' stored, 'other' asked"):
        run(tmp_path / "r.h5", work=refuse_work, analysis="other")
    assert (tmp_path / "r.h5").read_bytes() == before
    assert os.listdir(tmp_path) == ["r.h5"]


def test_an_unfinished_run_of_another_configuration_is_refused_and_kept(tmp_path):
    with pytest.raises(RuntimeError):
        run(tmp_path / "r.h5", work=Counted(5, RuntimeError()))
    with pytest.raises(InputError, match=r"unfinished result of another configuration.*seed"):
        run(tmp_path / "r.h5", CONFIG | {"seed": 8}, work=refuse_work)
    rest = Counted()
    run(tmp_path / "r.h5", work=rest)
    assert rest.calls == len(WORK) - 5


def test_overwrite_replaces_other_and_equal_results_and_resumes_itself(tmp_path):
    run(tmp_path / "r.h5")
    other = CONFIG | {"seed": 8}
    with pytest.raises(RuntimeError):
        run(tmp_path / "r.h5", other, work=Counted(4, RuntimeError()), overwrite=True)
    assert (
        json.loads(store.read_attributes(tmp_path / "r.h5")["config"])["seed"] == 7
    )  # the old one, until the new is whole
    with pytest.raises(InputError, match="seed"):
        run(tmp_path / "r.h5", other)
    rest = Counted()
    run(tmp_path / "r.h5", other, work=rest, overwrite=True)
    assert rest.calls == len(WORK) - 4
    assert json.loads(store.read_attributes(tmp_path / "r.h5")["config"])["seed"] == 8
    again = Counted()
    run(tmp_path / "r.h5", other, work=again, overwrite=True)  # equal and finished: asked for, so computed anew
    assert again.calls == len(WORK)
    with pytest.raises(RuntimeError):
        run(tmp_path / "s.h5", work=Counted(4, RuntimeError()))
    fresh = Counted()
    run(tmp_path / "s.h5", other, work=fresh, overwrite=True)  # the other run's units are not used
    assert fresh.calls == len(WORK)
    assert sorted(os.listdir(tmp_path)) == ["r.h5", "s.h5"]


def test_a_foreign_target_is_replaced_only_when_asked(tmp_path):
    (tmp_path / "r.h5").write_text("<html>")
    with pytest.raises(InputError, match=r"a web page.*--overwrite"):
        run(tmp_path / "r.h5", work=refuse_work)
    assert (tmp_path / "r.h5").read_text() == "<html>"
    run(tmp_path / "r.h5", overwrite=True)
    (tmp_path / "folder.h5").mkdir()
    for overwrite in (False, True):
        with pytest.raises(InputError, match="a folder"):
            run(tmp_path / "folder.h5", work=refuse_work, overwrite=overwrite)


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", "swapped", "altered"])
def test_damaged_units_are_computed_again(tmp_path, damage):
    whole = run(tmp_path / "whole.h5").digest()
    with pytest.raises(RuntimeError):
        run(tmp_path / "r.h5", work=Counted(6, RuntimeError()))
    files = sorted((tmp_path / "r.h5.units").glob("*.h5"))
    assert len(files) == 6
    content = files[0].read_bytes()
    if damage == "altered":  # one bit of one float: only the checksum can tell
        at = content.find(compute((16, 1, 0))["loss"].tobytes())
        assert at > 0
        files[0].write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    else:
        files[0].write_bytes(
            {"truncated": content[:-7], "empty": b"", "foreign": b"x", "swapped": files[1].read_bytes()}[damage]
        )
    rest = Counted()
    assert run(tmp_path / "r.h5", work=rest).digest() == whole
    assert rest.calls == len(WORK) - 5


def test_full_disk_keeps_finished_units_and_leaves_no_half_file(tmp_path, monkeypatch):
    real, calls = os.write, []

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(1)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(atomic.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        run(tmp_path / "r.h5")
    monkeypatch.undo()
    assert not (tmp_path / "r.h5").exists()
    assert not list(tmp_path.rglob("*.partial"))
    rest = Counted()
    run(tmp_path / "r.h5", work=rest)
    assert 0 < rest.calls < len(WORK)


def test_foreign_files_in_the_folder_survive(tmp_path):
    with pytest.raises(RuntimeError):
        run(tmp_path / "r.h5", work=Counted(2, RuntimeError()))
    (tmp_path / "r.h5.units" / "mine.h5").write_text("keep")
    run(tmp_path / "r.h5")
    assert os.listdir(tmp_path / "r.h5.units") == ["mine.h5"]


def test_unit_ids_that_look_alike_stay_apart(tmp_path):
    work = {"a/b": 1, "a_b": 2, "a b": 3, "": 4, "ä" * 300: 5, "../up": 6}

    def one(value: int) -> Dataset:
        return Dataset({"x": Variable(("s",), [value], "1", "d")})

    def joined(parts: dict[str, Dataset]) -> Result:
        return Result({"": store.concatenate(list(parts.values()), "s")})

    result = units.run_units(work, one, joined, target=tmp_path / "r.h5", analysis="x", config={}, attributes={})
    assert result["x"].tolist() == [1, 2, 3, 4, 5, 6]
    assert os.listdir(tmp_path) == ["r.h5"]


def test_no_units_and_damaged_state_are_refused(tmp_path):
    with pytest.raises(InputError, match="no units of work"):
        units.run_units({}, compute, join, target=tmp_path / "r.h5", analysis="x", config={}, attributes={})
    (tmp_path / "r.h5.units").mkdir()
    (tmp_path / "r.h5.units" / units.STATE).write_text("{")
    with pytest.raises(InputError, match="delete the folder"):
        run(tmp_path / "r.h5", work=refuse_work)


def test_second_writer_is_refused_while_the_first_lives_and_not_after_it_is_killed(tmp_path):
    child = start(tmp_path / "r.h5", "import time; time.sleep(600)")
    wait_for(lambda: list((tmp_path / "r.h5.units").glob("*.h5")) or child.poll() is not None)
    before = sorted(os.listdir(tmp_path / "r.h5.units"))
    with pytest.raises(InputError, match=f"written by process {child.pid} on ") as caught:
        run(tmp_path / "r.h5", work=refuse_work, overwrite=True)
    assert "another --out" in str(caught.value)
    assert sorted(os.listdir(tmp_path / "r.h5.units")) == before
    child.kill()
    child.wait()
    run(tmp_path / "r.h5")  # no stale lock
    assert os.listdir(tmp_path) == ["r.h5"]


def test_mine_splits_everything_once_and_evenly():
    names = [str(i) for i in range(17)]
    for world in (1, 2, 3, 5, 17, 40):
        shares = [units.mine(names, rank, world) for rank in range(world)]
        assert [name for share in shares for name in share] == names
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path):
    folder = units.UnitFolder(tmp_path / "r.h5", CONFIG, analysis="fake")
    with pytest.raises(InputError, match="shared by all ranks"):
        folder.save("a", compute((1, 2, 3)))


def test_ranks_of_one_job_do_not_lock_each_other_out(tmp_path):
    first = units.UnitFolder(tmp_path / "r.h5", CONFIG, analysis="fake")
    todo = first.open(list(WORK))
    other = units.UnitFolder(tmp_path / "r.h5", CONFIG, analysis="fake")
    for name in units.mine(todo, 1, 2):
        other.save(name, compute(WORK[name]))
    first.lock.release()
    rest = Counted()
    assert run(tmp_path / "r.h5", work=rest, ranks=Ranks()).digest() == run(tmp_path / "whole.h5").digest()
    assert rest.calls == len(WORK) // 2


# ---- kills ----------------------------------------------------------------------------------------------------------

SLOW_RUN = """
    import sys, time
    sys.path[:0] = [{tests!r}, {repository!r}]
    import test_units
    from pathlib import Path

    def slow(work):
        {middle}
        return test_units.compute(work)

    count = 0
    def first_fast(work):
        global count
        count += 1
        return test_units.compute(work) if count == 1 else slow(work)

    print("start", flush=True)
    test_units.run(Path({target!r}), work=first_fast)
"""


def start(target: Path, middle: str) -> subprocess.Popen:
    script = textwrap.dedent(SLOW_RUN).format(
        tests=str(Path(__file__).parent), repository=str(REPOSITORY), target=str(target), middle=middle
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.01)


def complete_or_absent(target: Path, digest: str) -> bool:
    """Whether the target is there; if it is, it is whole."""
    if not target.exists():
        return False
    assert store.read(target).digest() == digest
    return True


def test_sigkill_at_random_moments_never_leaves_a_half_result(tmp_path):
    digest = run(tmp_path / "whole.h5").digest()
    target = tmp_path / "r.h5"
    rng = np.random.default_rng(5)
    kills = finished = 0
    while kills < 12:
        child = start(target, "time.sleep(0.004)")
        child.stdout.readline()
        time.sleep(rng.uniform(0, 0.06))
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            kills += 1
        child.wait()
        child.stdout.close()
        if complete_or_absent(target, digest) and finished < 4:  # start over, to be killed again
            finished += 1
            run(target, work=refuse_work)
            target.unlink()
    assert run(target).digest() == digest
    assert sorted(os.listdir(tmp_path)) == ["r.h5", "whole.h5"]


CRASHES = """
    import os, signal, sys
    sys.path[:0] = [{tests!r}, {repository!r}]
    import test_units
    from pathlib import Path

    def crash_after(count):
        # SIGKILL right after the count-th change of the file system
        state = [0]
        def wrap(real):
            def wrapped(*args, **kwargs):
                try:
                    return real(*args, **kwargs)
                finally:
                    state[0] += 1
                    if state[0] == count:
                        os.kill(os.getpid(), signal.SIGKILL)
            return wrapped
        for name in ("open", "write", "fsync", "replace", "unlink", "rmdir", "mkdir", "ftruncate", "pwrite"):
            setattr(os, name, wrap(getattr(os, name)))

    os.fsync = lambda descriptor: None  # a kill loses no page cache; its place in the sequence still counts
    folder, before, overwrite = Path({folder!r}), {before!r}, {overwrite!r}
    parts = dict(list(test_units.WORK.items())[2:4])  # two groups, few file operations
    whole = test_units.run(folder / "whole.h5", parts=parts).digest()
    other = lambda work: test_units.compute((9, *work[1:]))
    old = test_units.run(folder / "old.h5", test_units.CONFIG | {{"seed": 8}}, work=other, parts=parts).digest()
    seen = set()
    for count in range(1, 1000):
        target = folder / f"{{count}}" / "r.h5"
        target.parent.mkdir()
        if before:
            target.write_bytes((folder / "old.h5").read_bytes())
        child = os.fork()
        if not child:
            crash_after(count)
            test_units.run(target, overwrite=overwrite, parts=parts)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if target.exists():
            from analyses import store
            digest = store.read(target).digest()
            assert digest == whole or (before and digest == old), count
            seen.add(digest == whole)
        else:
            assert not before, count
            seen.add(None)
        counted = test_units.Counted()
        saved = len(list(Path(f"{{target}}.units").glob("*.h5")))
        new = target.exists() and digest == whole
        again = test_units.run(target, work=counted, overwrite=overwrite and not new, parts=parts)
        assert again.digest() == whole, count
        assert counted.calls == (0 if new else len(parts) - saved), (count, counted.calls, saved)
        assert os.listdir(target.parent) == ["r.h5"], (count, os.listdir(target.parent))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    else:
        raise AssertionError("the run never finished")
    assert len(seen) == 2, seen
    print(count)
"""


@pytest.mark.parametrize(("before", "overwrite"), [(False, False), (True, True)])
def test_a_kill_after_every_single_file_operation_is_mended(tmp_path, before, overwrite):
    script = textwrap.dedent(CRASHES).format(
        tests=str(Path(__file__).parent),
        repository=str(REPOSITORY),
        folder=str(tmp_path),
        before=before,
        overwrite=overwrite,
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 40  # that many crash points were tried


def staged(target: Path, second=None, kept: bool = False) -> Result:
    """Means of each architecture's batches, in a second stage that reads the units of the first."""

    def means(name: str, load: units.Load) -> Dataset:
        losses = [load(unit)["loss"] for unit in WORK if unit.startswith(name)]
        return Dataset({"mean": Variable((), float(np.mean(losses)), "nats per token", "mean loss")})

    def joined(parts: dict[str, Dataset], load: units.Load) -> Result:
        raw = join({unit: load(unit) for unit in WORK}).groups if kept else {}
        return Result({**parts, **raw})

    stages = [
        units.Stage("losses", WORK, lambda work, load: compute(work)),
        units.Stage("means", {"swa-16": "swa-16", "swa-32": "swa-32"}, second or means),
    ]
    return units.run_stages(stages, joined, target=target, analysis="fake", config=CONFIG, attributes={"seed": 7})


def test_stages_read_earlier_units_and_leave_nothing_behind(tmp_path, capsys):
    found = staged(tmp_path / "r.h5")
    assert list(found.groups) == ["swa-16", "swa-32"]
    expected = np.mean([compute(work)["loss"] for name, work in WORK.items() if name.startswith("swa-32")])
    assert found["swa-32/mean"] == pytest.approx(expected)
    said = capsys.readouterr().err
    assert "fake losses" in said
    assert "fake means" in said
    assert os.listdir(tmp_path) == ["r.h5"]
    assert len(staged(tmp_path / "kept.h5", kept=True).groups) == 2 + 4


def test_a_later_stage_that_fails_keeps_the_earlier_ones(tmp_path, monkeypatch):
    def fail(name: str, load: units.Load) -> Dataset:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        staged(tmp_path / "r.h5", second=fail)
    assert len(list((tmp_path / "r.h5.units").glob("*.h5"))) == len(WORK)
    monkeypatch.setitem(globals(), "compute", refuse_work)
    assert list(staged(tmp_path / "r.h5").groups) == ["swa-16", "swa-32"]
