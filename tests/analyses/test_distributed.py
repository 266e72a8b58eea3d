"""Two ranks under torchrun give the data of one; a failing rank ends the job soon, and each error is said once."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from analyses import distributed, store

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = """
    import os, sys, time
    sys.path[:0] = [{tests!r}, {repository!r}]
    import dataclasses, json, test_units
    from pathlib import Path
    from analyses import distributed
    from models import command_line
    from models.errors import InputError

    @dataclasses.dataclass(frozen=True)
    class Config:
        out: Path
        mode: str = "plain"
        seed: int = 7

    def main(config):
        with distributed.session() as ranks:
            if config.mode == "late" and ranks.rank == 1:
                time.sleep(2)
            def compute(work):
                def finished():
                    return len(list(Path(f"{{config.out}}.units").glob("*.h5")))
                if config.mode == "bad input" and ranks.rank == 1:
                    while finished() < 1:
                        time.sleep(0.01)
                    raise InputError("text 3 is empty; remove it")
                if config.mode == "bad input":
                    time.sleep(0.5 * finished())
                if config.mode == "waiting" and ranks.rank == 1:
                    while finished() < 6:
                        time.sleep(0.01)
                    time.sleep(0.2)
                    raise RuntimeError("a defect on rank 1")
                print(f"rank {{ranks.rank}} did", *work, flush=True)
                return test_units.compute(work)
            result = test_units.run(config.out, test_units.CONFIG | {{"seed": config.seed}}, compute, ranks=ranks)
            import torch
            import torch.distributed as dist
            total = torch.tensor([ranks.rank + 1])
            dist.all_reduce(total)  # collectives of an analysis work too
            assert total.item() == 3, total
            ranks.print("digest", result.digest())

    def job(name, port, arguments):
        # two ranks by their environment alone: rank 0 hosts the store, and no launcher ends a rank that waits
        children = []
        for rank in range(2):
            children.append(os.fork())
            if not children[-1]:
                os.dup2(os.open(f"{{name}}.{{rank}}.out", os.O_WRONLY | os.O_CREAT), 1)
                os.dup2(os.open(f"{{name}}.{{rank}}.err", os.O_WRONLY | os.O_CREAT), 2)
                os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}}
                os.environ |= {{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}}
                command_line.run(main, Config, arguments=arguments)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

    if "JOBS" not in os.environ:
        command_line.run(main, Config)
    import torch.distributed  # once, for all ranks of all jobs
    print(json.dumps({{name: job(name, *rest) for name, rest in json.loads(os.environ["JOBS"]).items()}}))
"""


def launch(folder: Path, launcher: list[str], arguments: list[str], **env: str) -> subprocess.CompletedProcess:
    script = folder / "script.py"
    fill = {"tests": str(Path(__file__).parent), "repository": str(REPOSITORY)}
    script.write_text(textwrap.dedent(SCRIPT).format(**fill), encoding="utf-8")
    command = [sys.executable, *launcher, str(script), *arguments]
    # torch itself warns on stderr when the rank that hosts the store happens to end first
    everything = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **env}
    return subprocess.run(command, env=everything, cwd=folder, capture_output=True, text=True)


def undistributed(target: Path) -> store.Result:
    """The same run in this process."""
    spec = importlib.util.spec_from_file_location("units_of_test", Path(__file__).parent / "test_units.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run(target)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def test_two_ranks_give_the_data_of_one_and_share_the_work(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    two = launch(tmp_path, torchrun, ["--out", "two.h5"])
    assert two.returncode == 0, two.stderr[-3000:]
    one = undistributed(tmp_path / "one.h5")
    for rank in (0, 1):
        assert two.stdout.count(f"rank {rank} did") == 6
    assert two.stdout.count("digest") == 1
    assert f"digest {one.digest()}" in two.stdout
    assert store.read(tmp_path / "two.h5").digest() == one.digest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.h5", "script.py", "two.h5"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Exit codes of two ranks, stdout and stderr of each, for jobs that go wrong; the folder where they ran."""
    folder = tmp_path_factory.mktemp("jobs")
    undistributed(folder / "finished.h5")
    planned = {
        "refused": ["--out", "finished.h5", "--seed", "8"],
        "late": ["--out", "finished.h5", "--seed", "8", "--mode", "late"],
        "bad input": ["--out", "a.h5", "--mode", "bad input"],
        "waiting": ["--out", "b.h5", "--mode", "waiting"],
        "nonsense": ["--out", "c.h5", "--nope"],
    }
    began = time.monotonic()
    done = launch(folder, [], [], JOBS=json.dumps({name: [free_port(), planned[name]] for name in planned}))
    assert done.returncode == 0, done.stderr[-3000:]
    assert time.monotonic() - began < distributed.TIMEOUT / 2  # nobody waited for the limit of a collective
    codes = json.loads(done.stdout.splitlines()[-1])

    def said(name: str, stream: str) -> list[str]:
        return [(folder / f"{name}.{rank}.{stream}").read_text() for rank in (0, 1)]

    return folder, {name: (codes[name], said(name, "out"), said(name, "err")) for name in planned}


@pytest.mark.parametrize("name", ["refused", "late"])
def test_a_refusal_is_said_once_and_ends_all_ranks(jobs, name):
    """Also a rank that looks for word when rank 0, whose process holds the store, has long refused."""
    codes, out, err = jobs[1][name]
    assert codes == [2, 1]
    assert out == ["", ""]
    assert err[0].count("\n") == 1
    assert "seed: 7 stored, 8 asked" in err[0]
    assert err[1] == ""


def test_bad_input_on_one_rank_stops_the_other_at_its_next_unit(jobs):
    codes, out, err = jobs[1]["bad input"]
    assert codes == [1, 2]
    assert err[1] == "error on rank 1: text 3 is empty; remove it\n"
    assert "error" not in err[0]
    assert 0 < out[0].count("did") < 6
    assert not (jobs[0] / "a.h5").exists()
    assert len(list((jobs[0] / "a.h5.units").glob("*.h5"))) == out[0].count("did")  # kept for the next run


def test_a_defect_on_one_rank_frees_the_other_from_waiting_and_shows_its_traceback(jobs):
    codes, out, err = jobs[1]["waiting"]
    assert codes == [1, 1]
    assert "RuntimeError: a defect on rank 1" in err[1]
    assert "Traceback" in err[1]
    assert "Traceback" not in err[0]
    assert out[0].count("did") == 6
    assert not (jobs[0] / "b.h5").exists()


def test_wrong_arguments_are_said_by_rank_0_only(jobs):
    codes, _, err = jobs[1]["nonsense"]
    assert codes == [2, 2]
    assert err == ["error: Unrecognized options: --nope; see --help\n", ""]


def test_without_torchrun_there_is_one_rank_and_no_process_group(monkeypatch, capsys):
    for name in distributed.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    import torch.distributed

    with distributed.session() as ranks:
        assert (ranks.rank, ranks.world, ranks.first) == (0, 1, True)
        assert not torch.distributed.is_initialized()
        ranks.barrier()
        ranks.check()
        assert ranks.from_first(lambda: {"a": [1]}) == {"a": [1]}
        ranks.print("once")
    with pytest.raises(KeyError), distributed.session():
        raise KeyError
    assert capsys.readouterr().out == "once\n"
    other = distributed.Ranks(rank=1, world=2)
    other.print("never")
    assert capsys.readouterr().out == ""
