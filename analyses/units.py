"""Work cut into units that survive a kill: one small file each beside the target, joined into it by rename.

A unit is whatever an analysis computes in one go (checkpoint x condition x document batch). Any kill loses at most the
unit in progress on each rank; a rerun computes what is missing and gives byte-identical data. Cost: one HDF5 file of at
least 10 KB and two fsyncs per unit, and all data in memory at the join; units of a second or more are sensible.
"""

import contextlib
import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from analyses import provenance, store
from analyses.atomic import PARTIAL, remove_partials, write_bytes
from analyses.distributed import Ranks
from analyses.writer_lock import WriterLock
from models.errors import InputError

Work = TypeVar("Work")
Load = Callable[[str], store.Dataset]
STATE = "run.json"
UNIT_FILES = "*-????????????.h5"  # what UnitFolder._file makes


class UnitFolder:
    """The folder `TARGET.units` of one run: same analysis and `config` (see provenance.configuration), or refused."""

    def __init__(
        self, target: Path | str, config: Mapping[str, Any], *, analysis: str = "", overwrite: bool = False
    ) -> None:
        self.target = Path(target)
        self.folder = self.target.with_name(f"{self.target.name}.units")
        self.identity = {"analysis": analysis, "config": provenance.plain(config)}
        self.overwrite = overwrite
        self.started = ""
        self.lock = WriterLock(self.folder / "lock")
        self.key = _key(self.identity)

    @functools.cached_property
    def environment(self) -> str:
        """JSON of the versions and commit at work in this process."""
        return provenance.canonical(provenance.environment())

    def stored(self) -> dict[str, Any] | None:
        """Root attributes of a finished target of this very run; None without one, or with `overwrite`.

        Refused: a target of another run, a file that is no result.
        """
        if not self.target.exists() or self.overwrite:
            if self.target.is_dir():
                raise InputError(f"{self.target} is a folder; give a file name for --out")
            return None
        try:
            attributes = store.read_attributes(self.target)
        except store.StoreError as error:
            raise InputError(f"{error}. To replace it, add --overwrite") from error
        stored = {"analysis": attributes.get("analysis"), "config": json.loads(attributes.get("config", "{}"))}
        self._refuse_other(stored, self.target, "finished")
        return attributes

    def open(self, units: Sequence[str]) -> list[str] | None:
        """Lock the folder, give the units to compute (missing or damaged); None if the target is finished."""
        if self.stored() is not None:
            self.clear_leftover()
            return None
        self.lock.acquire(str(self.target))
        if self.stored() is not None:  # its writer finished between the two lines above
            self.clear_leftover()
            return None
        remove_partials(self.target)
        state = self._state()
        if state and (self._of_target(state) or (self.overwrite and state["identity"] != self.identity)):
            self._clear()
            state = None
        if state is None:
            state = {"identity": self.identity, "started": provenance.now()}
            write_bytes(self.folder / STATE, provenance.canonical(state).encode())
        self._refuse_other(state["identity"], self.folder, "unfinished")
        self.started = state["started"]
        for partial in self.folder.glob(f".*{PARTIAL}"):
            partial.unlink()
        return [unit for unit in units if not self._usable(unit)]

    def save(self, unit: str, dataset: store.Dataset) -> None:
        """Store one finished unit, atomically. Any rank may call it, for units of its own."""
        if not (self.folder / STATE).exists():
            raise InputError(f"{self.folder} is not visible here; --out must lie on a file system shared by all ranks")
        attributes = {"unit": unit, "run_sha256": self.key, "environment": self.environment}
        store.write(self._file(unit), store.Result({store.ROOT: dataset}, attributes), compress=False)

    def load(self, unit: str) -> tuple[store.Dataset, str]:
        """One finished unit and the environment (JSON) that computed it; StoreError if damaged or of another run."""
        path = self._file(unit)
        result = store.read(path)
        if result.attributes.get("unit") != unit or result.attributes.get("run_sha256") != self.key:
            raise store.StoreError(f"{path}: holds a unit of another run; delete it")
        return result.groups[store.ROOT], result.attributes["environment"]

    def environment_of(self, unit: str) -> str:
        """The environment (JSON) that computed a finished unit, without reading its data."""
        return str(store.read_attributes(self._file(unit))["environment"])

    def finish(self, result: store.Result) -> None:
        """Put the joined result in place, then remove the folder; a kill between the two is mended by the next run."""
        store.write(self.target, result)
        self.discard()

    def discard(self) -> None:
        """Remove our files and the folder (foreign files keep it), and the lock with it."""
        self._clear()
        self.lock.discard()

    def clear_leftover(self) -> None:
        """Remove the folder of the finished target if its run was killed before it could; not a living writer's."""
        if not self.folder.is_dir():
            return
        with contextlib.suppress(InputError, OSError):  # taken by somebody at work, or a read-only file system
            self.lock.acquire(str(self.target))
        if self.lock.held:
            state = self._state()
            if state is None or self._of_target(state):
                self.discard()
            self.lock.release()

    def _file(self, unit: str) -> Path:
        readable = re.sub(r"[^A-Za-z0-9.=+-]+", "_", unit)[:100].lstrip(".")
        return self.folder / f"{readable}-{hashlib.sha256(unit.encode()).hexdigest()[:12]}.h5"

    def _usable(self, unit: str) -> bool:
        try:
            self.load(unit)
        except store.StoreError:
            self._file(unit).unlink(missing_ok=True)
            return False
        return True

    def _state(self) -> dict[str, Any] | None:
        path = self.folder / STATE
        if not path.exists():
            return None
        try:
            state = json.loads(path.read_bytes())
            return {"identity": state["identity"], "started": state["started"]}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: damaged ({error}); delete the folder {self.folder}") from error

    def _of_target(self, state: Mapping[str, Any]) -> bool:
        """Whether this folder's run made the target, and was killed before it could remove the folder."""
        if not self.target.is_file():
            return False
        try:
            attributes = store.read_attributes(self.target)
        except store.StoreError:
            return False
        return attributes.get("run_sha256") == _key(state["identity"]) and attributes.get("time") == state["started"]

    def _clear(self) -> None:
        """Remove unit files first, the state last: a kill in between leaves a folder that still says whose it is."""
        for path in (*self.folder.glob(UNIT_FILES), *self.folder.glob(f".*{PARTIAL}"), self.folder / STATE):
            path.unlink(missing_ok=True)

    def _refuse_other(self, stored: Mapping[str, Any], path: Path, kind: str) -> None:
        if lines := provenance.differences(stored, self.identity):
            raise InputError(
                f"{path} holds the {kind} result of another configuration ({'; '.join(lines)}); "
                "give another --out, or --overwrite to replace it"
            )


def _key(identity: Mapping[str, Any]) -> str:
    """sha256 that names a run."""
    return hashlib.sha256(provenance.canonical(identity).encode()).hexdigest()


def mine(units: Sequence[str], rank: int, world: int) -> list[str]:
    """The units of one rank: a contiguous share, equal to within one unit, so that each rank loads few checkpoints."""
    return list(units[rank * len(units) // world : (rank + 1) * len(units) // world])


@dataclass(frozen=True)
class Stage:
    """Units {readable id: input of compute}. `compute(input, load)` may read units of earlier stages by `load(id)`."""

    name: str
    units: Mapping[str, Any]
    compute: Callable[[Any, Load], store.Dataset]


def run_units(
    units: Mapping[str, Work],
    compute: Callable[[Work], store.Dataset],
    join: Callable[[dict[str, store.Dataset]], store.Result],
    *,
    target: Path | str,
    analysis: str,
    config: Mapping[str, Any],
    attributes: Callable[[], Mapping[str, Any]] | Mapping[str, Any],
    overwrite: bool = False,
    ranks: Ranks | None = None,
) -> store.Result:
    """Compute the missing `units` {readable id: input of compute}, join all in this order, write `target`, return it.

    The result is read back from `target` on every rank, computed now or found finished (then neither `compute` nor
    `attributes` is called). `attributes`: provenance.run_attributes(...); analysis, config, time (of the start),
    versions and commit are added here. `compute` must depend on its unit and the config alone.
    """
    return run_stages(
        [Stage("", units, lambda work, load: compute(work))],
        lambda parts, load: join(parts),
        target=target,
        analysis=analysis,
        config=config,
        attributes=attributes,
        overwrite=overwrite,
        ranks=ranks,
    )


def run_stages(
    stages: Sequence[Stage],
    join: Callable[[dict[str, store.Dataset], Load], store.Result],
    *,
    target: Path | str,
    analysis: str,
    config: Mapping[str, Any],
    attributes: Callable[[], Mapping[str, Any]] | Mapping[str, Any],
    overwrite: bool = False,
    ranks: Ranks | None = None,
) -> store.Result:
    """run_units in stages, one after the other on all ranks: `join` gets the units of the last stage, and `load`.

    Units of earlier stages are removed with the folder once the result is there; what shall stay, `join` loads.
    """
    ranks = ranks or Ranks()
    folder = UnitFolder(target, config, analysis=analysis, overwrite=overwrite)
    try:
        plan = ranks.from_first(lambda: _plan(folder, [unit for stage in stages for unit in stage.units]))
        if plan is not None:
            missing = set(plan)
            for stage in stages:
                todo = [unit for unit in stage.units if unit in missing]
                _compute(folder, stage, mine(todo, ranks.rank, ranks.world), ranks)
                ranks.barrier()
            if ranks.first:
                folder.finish(_joined(folder, stages, join, attributes))
            ranks.barrier()
    finally:
        folder.lock.release()
    return store.read(target)


def _plan(folder: UnitFolder, units: list[str]) -> list[str] | None:
    """On rank 0: the units to compute, or None when the target is finished."""
    if not units:
        raise InputError(f"{folder.target}: no units of work; the data or conditions given select nothing")
    return folder.open(units)


def _compute(folder: UnitFolder, stage: Stage, todo: list[str], ranks: Ranks) -> None:
    name = " ".join(filter(None, (folder.identity["analysis"], stage.name)))
    name += f" (rank 0 of {ranks.world})" if ranks.world > 1 else ""
    interval = 0.2 if sys.stderr.isatty() else 30.0  # seconds; log files get few lines
    for unit in tqdm(todo, desc=name, unit="unit", disable=not (ranks.first and todo), mininterval=interval):
        ranks.check()
        folder.save(unit, stage.compute(stage.units[unit], lambda other: folder.load(other)[0]))


def _joined(
    folder: UnitFolder,
    stages: Sequence[Stage],
    join: Callable[[dict[str, store.Dataset], Load], store.Result],
    attributes: Callable[[], Mapping[str, Any]] | Mapping[str, Any],
) -> store.Result:
    loaded = {unit: folder.load(unit) for unit in stages[-1].units}
    result = join({unit: dataset for unit, (dataset, _) in loaded.items()}, lambda unit: folder.load(unit)[0])
    earlier = {folder.environment_of(unit) for stage in stages[:-1] for unit in stage.units}
    environments = sorted(earlier | {environment for _, environment in loaded.values()})
    root = {
        "analysis": folder.identity["analysis"],
        "config": provenance.canonical(folder.identity["config"]),
        "run_sha256": folder.key,
        "time": folder.started,
        **json.loads(folder.environment),
        "unit_environments": provenance.canonical([json.loads(text) for text in environments]),
        **(attributes() if callable(attributes) else attributes),
        **result.attributes,
    }
    return store.Result(result.groups, root)
