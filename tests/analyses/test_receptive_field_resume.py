"""A killed study continues where it was and two ranks share it: the same data as one uninterrupted process."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from analyses import store

REPOSITORY = Path(__file__).resolve().parents[2]

# One process imports and warms up everything, then forks a child per attempt: a fresh start costs seconds.
PARENT = """
    import json, os, random, signal, sys, time
    sys.path.insert(0, {repository!r})
    import torch
    torch.set_num_threads(1)  # no thread pool that a fork would break
    from pathlib import Path
    from analyses import store
    from analyses.receptive_field import Config, receptive_field
    from analyses.receptive_field_plan import Plan

    folder = Path({folder!r})
    sys.stderr = open(os.devnull, "w")

    def study(target):
        return Config(
            paths=(folder / "ckpt",), out=target, windows=(3, 9), prompts=2, prompt_length=330,
            haystack="noise", texts=folder / "texts", key_tokens=folder / "keys", reach=(5,),
        )

    def finished_units(target):
        return len(list(Path(f"{{target}}.units").glob("*.h5")))

    def attempt(target, more=None, delay=0.0):
        # whether it came to its end; else killed `delay` seconds after it has finished so many more units
        goal = None if more is None else finished_units(target) + more
        child = os.fork()
        if child == 0:
            code = 1
            try:
                receptive_field(study(target))
                code = 0
            finally:
                os._exit(code)
        if goal is not None:
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while finished_units(target) < goal and os.waitid(os.P_PID, child, look) is None:
                time.sleep(0.002)
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
        return not os.WIFSIGNALED(status)

    expected = receptive_field(study(folder / "whole.h5")).digest()
    started = time.monotonic()
    units = len(Plan(study(folder / "timed.h5"), "cpu").units)
    planned = time.monotonic()
    attempt(folder / "timed.h5")
    planning, unit = planned - started, (time.monotonic() - planned) / units
    assert store.read(folder / "timed.h5").digest() == expected
    rng, report = random.Random(7), []
    target, runs = folder / "killed.h5", 0
    for number in range(10):  # by progress, not by the clock: another load of the machine must not end the attempts
        more = number % 3
        ended = attempt(target, more, rng.random() * (unit if more else planning + unit))
        if target.exists():
            assert store.read(target).digest() == expected, "present but not complete"
        kept = finished_units(target) if not target.exists() else -1
        report.append([ended, kept])
        if target.exists():
            attempt(target)  # also clears what a kill between rename and cleaning left
            assert not Path(f"{{target}}.units").exists()
            runs += 1
            target = folder / f"killed{{runs}}.h5"
    attempt(target)
    assert not Path(f"{{target}}.units").exists()
    print(json.dumps({{"report": report, "last": str(target), "seconds": [planning, unit]}}))
"""


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    tiny.recall_folder(folder)
    for name, kinds in (("gdn", ("gdn", "full")), ("swa", ("swa", "full", "swa"))):
        tiny.save(tiny.model(*kinds, context_length=64), folder / "ckpt" / name)
    return folder


def test_kills_at_random_moments_lose_at_most_the_unit_at_work(folder):
    script = textwrap.dedent(PARENT.format(repository=str(REPOSITORY), folder=str(folder)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(not ended for ended, _ in found["report"]) >= 5, "most attempts must have been killed"
    kept = [units for _, units in found["report"]]
    assert max(kept) > 0, f"some kill must have left finished units behind: {found}"
    for (_, before), (_, after) in zip(found["report"], found["report"][1:], strict=False):
        assert after == -1 or before == -1 or after >= before, "a finished unit was lost"
    whole, last = store.read(folder / "whole.h5"), store.read(found["last"])
    assert last.digest() == whole.digest()
    assert list(last.groups) == list(whole.groups)
    changing = {"time", "unit_environments"}
    assert {k: v for k, v in last.attributes.items() if k not in changing} == {
        k: v for k, v in whole.attributes.items() if k not in changing
    }


def test_two_ranks_give_the_data_of_one_process(folder, tmp_path):
    arguments = [
        str(folder / "ckpt"), "--windows", "3", "9", "--reach", "5", "--prompts", "2", "--prompt-length", "330",
        "--haystack", "noise", "--texts", str(folder / "texts"), "--key-tokens", str(folder / "keys"),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}

    def study(target, *launcher):
        command = [sys.executable, *launcher, "-m", "analyses.receptive_field", *arguments, "--out", str(target)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = study(tmp_path / "two.h5", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    one = folder / "whole.h5"  # the same study, computed by one process above
    if not one.exists():
        study(one)
    assert store.read(tmp_path / "two.h5").digest() == store.read(one).digest()
    configs = [store.read_attributes(target)["config"] for target in (tmp_path / "two.h5", one)]
    assert configs[0] == configs[1]
    assert said.count("key tokens in 3 documents") == 2, "one table, of two checkpoints, by rank 0"
    assert said.splitlines()[-1] == str(tmp_path / "two.h5")
    assert os.listdir(tmp_path) == ["two.h5"]
