"""The command line of an analysis: a Config dataclass becomes options, a caller's mistake one line and exit code 2.

Exit codes: 0 done (or already done), 2 bad input, 130 interrupted; any other exception is a defect and keeps its
traceback. HYBRIDSCOPE_DEBUG=1 or --debug keeps the traceback of bad input too.
"""

import contextlib
import dataclasses
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

from models.errors import InputError

ConfigType = TypeVar("ConfigType")
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
DEBUG = "HYBRIDSCOPE_DEBUG"
FILE_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
HINT = f"{DEBUG}=1 or --debug shows the traceback of a bad-input error."


def shown(metavar: str) -> Any:
    """How --help names a value whose default the description tells, since it depends on the checkpoint or device."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def check_least(config: Any, **least: int) -> None:
    """InputError for an option of `config` below its least value; None is a default that is found later."""
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise InputError(f"--{name.replace('_', '-')} is {value}; expected {bound} or more")


def run(
    main: Callable[[ConfigType], Any],
    config_class: type[ConfigType],
    *,
    prog: str | None = None,
    description: str | None = None,
    arguments: Sequence[str] | None = None,
) -> NoReturn:
    """Parse `arguments` (default: those of the process) into `config_class`, call `main(config)` and exit.

    torch is imported by `main` at the earliest, so --help stays fast. Under torchrun rank 0 speaks for
    wrong arguments, which all ranks share. `main` may return an exit code; anything else counts as 0.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or os.environ.get(DEBUG, "") not in ("", "0")
    given = [argument for argument in given if argument != "--debug"]
    try:
        code = main(_parse(config_class, given, prog, description))
        sys.stdout.flush()
    except BrokenPipeError:  # `... | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        _stop("interrupted; finished units are kept, the same command continues with the missing ones", 130)
    except Exception as error:
        if type(error).__name__ == "PeerError":  # by name: importing analyses.distributed is not this module's business
            sys.exit(1)  # the rank that failed has printed why
        message = bad_input(error)
        if message is None or debug:
            raise
        _stop(message, 2)
    sys.exit(code if isinstance(code, int) and not isinstance(code, bool) else 0)


def bad_input(error: Exception) -> str | None:
    """One line for an exception that a caller can mend; None for a defect, whose traceback is needed."""
    if isinstance(error, OSError):
        if not isinstance(error, FILE_ERRORS) and error.errno not in DISK_ERRORS:
            return None
        text = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return _one_line(text)
    if isinstance(error, InputError):
        return _one_line(str(error))
    if isinstance(error, ValueError):  # from another package: most likely bad input, but say how to see more
        return f"{_one_line(str(error) or type(error).__name__)} ({DEBUG}=1 shows where)"
    return None


def _parse(config_class: type[ConfigType], given: list[str], prog: str | None, description: str | None) -> ConfigType:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            text = description or config_class.__doc__ or ""
            if dataclasses.is_dataclass(config_class) and text.startswith(f"{config_class.__name__}("):
                text = ""  # the signature that @dataclass writes where there is no docstring
            return tyro.cli(config_class, args=given, prog=prog, description=f"{text.strip()}\n\n{HINT}".strip())
    except SystemExit as stop:
        if stop.code in (0, None) or _rank():
            raise  # all ranks got the same arguments: rank 0 says what is wrong with them
        cause: BaseException | None = stop
        while cause is not None and not isinstance(cause, InputError):
            cause = cause.__context__
        if cause is not None:  # a Config that checks itself in __post_init__; tyro would break its long words
            _stop(_one_line(str(cause)), 2)
        _stop(_without_box(said.getvalue()), 2)


def _stop(message: str, code: int) -> NoReturn:
    where = f" on rank {_rank()}" if _rank() else ""
    print(f"error{where}: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def _rank() -> int:
    return int(os.environ.get("RANK", "0")) if "WORLD_SIZE" in os.environ else 0


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _without_box(text: str) -> str:
    """The statement of tyro's framed message, without frame, title and repeated help text."""
    kept: list[str] = []
    for line in text.splitlines()[1:]:  # after the title
        words = line.strip("│╰╯ ")
        if words.strip("─-"):
            kept.append(words)
        elif kept:  # a rule, drawn with "-" where stdout is ASCII: help follows
            break
    return f"{_one_line(' '.join(kept)) or _one_line(text)}; see --help"
