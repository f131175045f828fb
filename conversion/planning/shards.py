"""The base shards of a conversion, two at a time: brought, compared with the base's, read for their digests."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from hf_hyperconn.errors import VerificationError

from ..files.transfer import bring, compare, digest
from ..interrupts import holding_interrupts
from .plan import ConversionPlan


def bring_shards(plan: ConversionPlan, work: Path, meanwhile: Callable[[], None]) -> None:
    """Copy or link every shard into the folder `work`; `meanwhile` is called on this thread."""

    def bring_shard(name: str, progress: Callable[[int], None]) -> None:
        bring(plan.base.source.path(name), work / plan.shards[name], plan.link, progress)

    _for_each_shard(plan, "Base weights", bring_shard, meanwhile)


def shard_digests(plan: ConversionPlan, work: Path, verify: str) -> dict[str, str]:
    """The SHA-256 of each shard by its name in the base; without verification only those that the Hub has told."""
    if verify == "off":
        return {name: known for name, known in plan.base.source.sha256.items() if name in plan.shards}
    return _read_shards(plan, work) if verify == "structure" else _compare_shards(plan, work)


def _compare_shards(plan: ConversionPlan, work: Path) -> dict[str, str]:
    """Read the shards back beside the base's. Returns the SHA-256 of each by its name in the base."""

    def compare_shard(name: str, progress: Callable[[int], None]) -> str:
        found = compare(plan.base.source.path(name), work / plan.shards[name], progress)
        if plan.base.source.sha256.get(name, found) != found:
            raise VerificationError(
                f"'{plan.base.source.path(name)}' is not the file that the Hub holds. Download it again."
            )
        return found

    return _for_each_shard(plan, "Comparing", compare_shard)


def _read_shards(plan: ConversionPlan, work: Path) -> dict[str, str]:
    """The SHA-256 of each shard by its name in the base; those that the Hub has not told are read for it."""

    def read_shard(name: str, progress: Callable[[int], None]) -> str:
        if known := plan.base.source.sha256.get(name):
            progress(plan.base.source.files[name])
            return known
        return digest(work / plan.shards[name], progress)

    return _for_each_shard(plan, "Reading", read_shard)


def _for_each_shard(plan: ConversionPlan, title: str, work, meanwhile=lambda: None) -> dict:
    """Run `work(name, progress)` for every base shard, two at a time, with one bar of bytes; results by name.

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

        pending = {name: pool.submit(work, name, advance) for name in plan.shards}
        try:
            meanwhile()
            return {name: future.result() for name, future in pending.items()}
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
