"""The command line: bad input is one line and exit code 2, defects keep their traceback, --help is cheap."""

import errno
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyses.distributed import PeerError
from models import command_line
from models.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Config:
    """Measure something."""

    out: Path
    """Where the result goes."""
    window: int = 4
    """Visible keys."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise InputError(f"window is {self.window}, expected at least 1; give --window 1")


def call(main: Any, *arguments: str) -> Any:
    with pytest.raises(SystemExit) as stop:
        command_line.run(main, Config, prog="measure", arguments=["--out", "r.h5", *arguments])
    return stop.value.code


def raising(error: BaseException) -> Any:
    def main(config: Config) -> None:
        raise error

    return main


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in (command_line.DEBUG, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("layers.2 is full attention;\n  choose 0, 1"), "error: layers.2 is full attention; choose 0, 1"),
        (ValueError("T is 3, expected 4"), "error: T is 3, expected 4 (HYBRIDSCOPE_DEBUG=1 shows where)"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "ckpt/config.json"),
            "error: ckpt/config.json: No such file or directory",
        ),
        (
            FileNotFoundError("ckpt has no config.json; give a checkpoint"),
            "error: ckpt has no config.json; give a checkpoint",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/secret/x"), "error: /secret/x: Permission denied"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), "error: a/b: Not a directory"),
        (OSError(errno.ENOSPC, "No space left on device"), "error: [Errno 28] No space left on device"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, error, line):
    assert call(raising(error)) == 2
    said = capsys.readouterr()
    assert said.err == line + "\n"
    assert said.out == ""


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), KeyError("x"), AssertionError("x"), TypeError("x"), OSError(5000, "x")]
)
def test_defects_keep_their_traceback(error):
    with pytest.raises(type(error)):
        command_line.run(raising(error), Config, arguments=["--out", "r.h5"])


def test_debug_shows_the_traceback_of_bad_input(monkeypatch):
    for arguments, value in ((["--debug"], ""), ([], "1")):
        monkeypatch.setenv(command_line.DEBUG, value)
        with pytest.raises(InputError):
            command_line.run(raising(InputError("x")), Config, arguments=["--out", "r.h5", *arguments])
    monkeypatch.setenv(command_line.DEBUG, "0")
    assert call(raising(InputError("x"))) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--window", "many"], "Error parsing --window"),
        (["--nope", "1"], "Unrecognized options: --nope"),
        (["--window", "many", "--out", "a" * 300 + " b" * 50], "Error parsing --window"),
        (["--window", "0"], "window is 0, expected at least 1; give --window 1"),
    ],
)
def test_wrong_arguments_are_one_line_too(capsys, arguments, says):
    assert call(raising(AssertionError()), *arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {says}")
    assert not set("│╭─╰") & set(lines[0])


def test_a_missing_required_option_is_named(capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.run(raising(AssertionError()), Config, prog="measure", arguments=[])
    assert stop.value.code == 2
    assert "--out" in capsys.readouterr().err


def test_interruption_peers_and_exit_codes(capsys, monkeypatch):
    assert call(raising(KeyboardInterrupt())) == 130
    assert "finished units are kept" in capsys.readouterr().err
    assert call(raising(PeerError("rank 1 stopped"))) == 1
    assert capsys.readouterr().err == ""  # the other rank has said why
    assert call(lambda config: None) == 0
    assert call(lambda config: 3) == 3
    assert call(lambda config: True) == 0
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    assert call(raising(InputError("text 3 is empty"))) == 2
    assert capsys.readouterr().err == "error on rank 2: text 3 is empty\n"
    assert call(raising(AssertionError()), "--nope") == 2
    assert capsys.readouterr().err == ""  # rank 0 says it


def test_help_shows_field_docs_and_imports_nothing_heavy(tmp_path):
    script = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from models import command_line\n"
        "heavy = {'torch', 'transformers', 'transformer_lens', 'h5py', 'matplotlib', 'pandas'}\n"
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Config:\n"
        "    '''Measure something.'''\n"
        "    window: int = 4\n"
        "    '''Visible keys.'''\n"
        "try:\n"
        "    command_line.run(print, Config, prog='measure', arguments=['--help'])\n"
        "except SystemExit as stop:\n"
        "    assert stop.code in (0, None), stop.code\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    (tmp_path / "measure.py").write_text(script)  # field docs are read from the source
    done = subprocess.run([sys.executable, tmp_path / "measure.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for text in ("usage: measure", "Measure something.", "Visible keys.", "--debug"):
        assert text in done.stdout


def test_a_closed_pipe_is_no_defect(tmp_path):
    script = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from models import command_line\n"
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Config:\n"
        "    n: int = 100000\n"
        "def main(config):\n"
        "    for _ in range(config.n): print('line')\n"
        "command_line.run(main, Config, arguments=[])\n"
    )
    read, write = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    os.read(read, 5)
    os.close(read)
    assert child.communicate()[1] == ""
    assert child.returncode == 0


def test_numpy_messages_lead_to_the_place(capsys):
    def main(config: Config) -> None:
        np.zeros(2) + np.zeros(3)

    assert call(main) == 2
    assert "HYBRIDSCOPE_DEBUG=1 shows where" in capsys.readouterr().err
