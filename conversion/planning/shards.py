"""The base shards of a conversion, two at a time: brought, compared with the base's, read for their digests."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import TypeVar

from hf_hyperconn.errors import VerificationError

from ..files.writing import Progress, bring, compare, digest
from ..interrupts import holding_interrupts
from .plan import ConversionPlan

T = TypeVar("T")


def bring_shards(plan: ConversionPlan, work: Path, meanwhile: Callable[[], None]) -> None:
    """Copy or link every shard into the folder `work`; `meanwhile` is called on this thread."""

    def bring_shard(name: str, progress: Progress) -> None:
        bring(plan.base.source.path(name), work / plan.shards[name], plan.link, progress)

    _for_each_shard(plan, "Base weights", bring_shard, meanwhile)


def shard_digests(plan: ConversionPlan, work: Path, verify: str) -> dict[str, str]:
    """Return the SHA-256 of each shard by its name in the base.

    verify: without verification, "off", only the Hub's digests are returned. With "structure", the other shards are
        read, too. With any other mode, all are compared with the base's.
    """
    source = plan.base.source

    def read_shard(name: str, progress: Progress) -> str:
        if known := source.sha256.get(name):
            progress(source.files[name])
            return known
        return digest(work / plan.shards[name], progress)

    def compare_shard(name: str, progress: Progress) -> str:
        sha256 = compare(source.path(name), work / plan.shards[name], progress)
        if source.sha256.get(name, sha256) != sha256:
            raise VerificationError(f"'{source.path(name)}' is not the file that the Hub holds. Download it again.")
        return sha256

    if verify == "off":
        return {name: known for name, known in source.sha256.items() if name in plan.shards}
    if verify == "structure":
        return _for_each_shard(plan, "Reading", read_shard)
    return _for_each_shard(plan, "Comparing", compare_shard)


def _for_each_shard(
    plan: ConversionPlan,
    title: str,
    act: Callable[[str, Progress], T],
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, T]:
    """Run `act(name, progress)` for every base shard, two at a time, with one bar of bytes; results by name.

    meanwhile: called on this thread. An error or Ctrl-C stops all of it.
    """
    from huggingface_hub.utils import tqdm

    stop = Event()
    with (
        holding_interrupts() as interrupted,
        tqdm(total=plan.base_bytes, unit="B", unit_scale=True, desc=title, disable=None) as bar,
        ThreadPoolExecutor(2) as pool,
    ):

        def advance(count: int) -> None:
            bar.update(count)
            if stop.is_set() or interrupted():
                raise InterruptedError("stopped")

        pending = {name: pool.submit(act, name, advance) for name in plan.shards}
        try:
            meanwhile()
            return {name: future.result() for name, future in pending.items()}
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
