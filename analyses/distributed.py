"""Ranks of one job under torchrun; without torchrun one rank, and torch.distributed is never touched.

Ranks exchange small texts through the rendezvous store, not through collectives: waiting for a slow rank then has no
time limit, and a rank that fails is noticed by the others at their next unit or within a second of waiting. A rank that
is killed leaves no word; torchrun itself then ends the other ranks (within seconds, at most its 30 s grace). TIMEOUT
bounds the start, single exchanges with the store, and collectives that an analysis adds.
"""

import contextlib
import datetime
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 600.0  # seconds
GOODBYE = 10.0  # seconds
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class PeerError(RuntimeError):
    """Another rank failed and has printed why; this one only stops."""


@dataclass
class Ranks:
    """This process among the `world` of its job; its models belong on `device` ("cpu" or "cuda:LOCAL_RANK")."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    store: Any = None
    _exchanges: int = field(default=0, repr=False)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the one that prints, locks and joins."""
        return self.rank == 0

    def print(self, *values: Any) -> None:
        """print, on rank 0 only."""
        if self.first:
            print(*values, flush=True)

    def check(self) -> None:
        """Raise PeerError if another rank has failed. Cheap (one small message); call it between units of work."""
        if self.store is not None and self.store.check(["failure"]):
            raise PeerError(self.store.get("failure").decode())

    def barrier(self) -> None:
        """Wait until every rank is here, however long that takes; PeerError as soon as one has failed."""
        key = self._key("barrier")
        if self.store is not None:
            self.store.add(key, 1)
            self._wait(lambda: self.store.add(key, 0) >= self.world)

    def from_first(self, produce: Callable[[], Any]) -> Any:
        """The value (JSON types) that `produce` gives on rank 0, on all; its exception is PeerError elsewhere."""
        key = self._key("value")
        if self.store is None:
            return produce()
        if self.first:
            value = produce()
            self.store.set(key, json.dumps(value))
            return value
        self._wait(lambda: self.store.check([key]))
        return json.loads(self.store.get(key))

    def leave(self) -> None:
        """Wait for all ranks, then say goodbye."""
        self.barrier()
        self._goodbye()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one stops, and say goodbye."""
        if self.store is not None and not isinstance(error, PeerError):
            self.store.set("failure", f"rank {self.rank} of {self.world} stopped: {type(error).__name__}: {error}")
        self._goodbye()

    def _goodbye(self) -> None:
        """Rank 0 goes last, at most GOODBYE later, as it may host the store that others ask."""
        if self.store is not None:
            self.store.add("bye", 1)
            end = time.monotonic() + GOODBYE
            while self.first and self.store.add("bye", 0) < self.world and time.monotonic() < end:
                time.sleep(0.01)

    def _key(self, kind: str) -> str:
        self._exchanges += 1  # the same number on every rank, as all make the same calls
        return f"{kind}/{self._exchanges}"

    def _wait(self, ready: Callable[[], bool]) -> None:
        pause = 0.005
        while not ready():
            self.check()
            time.sleep(pause)
            pause = min(2 * pause, 0.5)


def launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return all(name in os.environ for name in LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1


def is_first() -> bool:
    """Whether this process is rank 0 of its job, also before and after the session: the one that prints."""
    return not launched() or os.environ["RANK"] == "0"


@contextlib.contextmanager
def session(timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Join the job, give this process's Ranks, leave cleanly; an exception here stops the other ranks as well."""
    if not launched():
        yield Ranks(device=_device())
        return
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    device = _device()
    limit = datetime.timedelta(seconds=timeout)
    store, rank, world = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    backend = "cpu:gloo,cuda:nccl" if device != "cpu" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world, timeout=limit)
    ranks = Ranks(rank, world, device, dist.PrefixStore("analysis", store))
    try:
        yield ranks
        ranks.leave()
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store may be gone: the error itself matters more
            ranks.fail(error)
        raise
    finally:
        dist.destroy_process_group()


def _device() -> str:
    """Pick and select the GPU of LOCAL_RANK."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local} has no GPU of its own: this host has {torch.cuda.device_count()}; "
            "lower --nproc-per-node"
        )
    torch.cuda.set_device(local)
    return f"cuda:{local}"
