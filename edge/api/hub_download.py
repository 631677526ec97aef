"""Finds a model by path or name, and downloads it from Hugging Face if it is not on this disk.

The network is used only for a repository that the user named and that is not in the cache, and
never in offline mode. Only files that Edge reads are downloaded. A broken download of a large file
is resumed by the next call; `huggingface_hub` alone would begin anew.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from edge.api.progress_bars import progress_bars
from edge.concurrency.blocking import StopFlag, Stopped, run_blocking
from edge.errors import CapacityError, CheckpointError, EdgeError, NetworkError, printable
from edge.host.atomic_files import write_whole
from edge.host.free_memory import format_size
from edge.models.families import read_family
from edge.offload import INDEX_FILE, StoreError, indexed_files
from edge.progress import OnProgress, Progress
from edge.text.files import read_json
from edge.weights.checkpoint import check_place
from edge.weights.folder_form import CONFIG
from edge.weights.hub_cache import UNFINISHED, folder_of
from edge.weights.model_names import NotCached, chosen_gguf, find_model, wanted_files
from edge.weights.writer_lock import only_writer

_LARGE_BYTES = 32 << 20
"""The least size of a file whose broken download is resumed."""
_MOST_PLAIN_BYTES = 50_000_000_000
"""Larger files are downloaded by the hub's own client, from their beginning."""
_SPARE_DISK_BYTES = 256 << 20
_READ_BYTES = 4 << 20
_LOOK_S = 0.1
"""Seconds between checks for a cancelled download."""
_NOT_FOR_YOU = (401, 403, 404)
"""HTTP statuses of private and of absent repositories."""


async def model_path(model: str | Path, progress: bool | OnProgress | None) -> Path:
    """The folder or GGUF file of a model by its path or name; downloads it if it is not here.

    Raises CheckpointError for a model that does not exist, NetworkError if Hugging Face cannot be
    reached, CapacityError for a full disk, RequestError for an invalid path or name.
    """
    found = await run_blocking(lambda: find_model(model, hub_cache=hub_cache()))
    if isinstance(found, Path):
        return found
    stop = StopFlag()
    with progress_bars(progress) as on_progress:

        def tell(event: Progress) -> None:
            stop.check()
            on_progress(event)

        return await run_blocking(
            partial(_unless_stopped, partial(_fetch, found, tell), stop), stop=stop.set
        )


def check_model(model: str | Path) -> None:
    """Raises the errors of `model_path` and of opening that this disk alone shows, so that a
    mistyped name is told before the search for peers."""
    found = find_model(model, hub_cache=hub_cache())
    if isinstance(found, Path):
        check_place(found)
        return
    _check_online(found)


def model_path_now(model: str | Path) -> Path:
    """Like `model_path`, for callers without an event loop."""
    found = find_model(model, hub_cache=hub_cache())
    if isinstance(found, Path):
        return found
    with progress_bars() as on_progress:
        return _fetch(found, on_progress)


def _unless_stopped(work: Callable[[], Path], stop: StopFlag) -> Path:
    """The result of `work`. Raises Stopped once the flag is set; a blocked read of the network then
    ends with its next bytes, or with the process."""
    future: Future[Path] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="download", daemon=True).start()
    while not wait([future], timeout=_LOOK_S).done:
        stop.check()
    return future.result()


def hub_cache() -> Path:
    """The folder of the Hugging Face cache, as the environment says."""
    _report_nothing()
    from huggingface_hub import constants  # its client, which is slow to import, is not

    return Path(constants.HF_HUB_CACHE)


def _client() -> Any:
    """The `huggingface_hub` package with the modules that are used here."""
    _report_nothing()
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.file_download
    import huggingface_hub.utils

    return huggingface_hub


def _report_nothing() -> None:
    """Turn off the package's reports of other installed software; it reads this when imported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def _fetch(wanted: NotCached, on_progress: OnProgress) -> Path:
    """Download a model. Raises the errors of `model_path`; a partial download is kept."""
    _check_online(wanted)
    hub, name = _client(), wanted.name
    cache = hub_cache()
    with _quiet(hub), _told(hub, wanted):
        info = hub.HfApi().model_info(name.repository, revision=name.revision, files_metadata=True)
        fetching = _Fetching(
            hub=hub,
            repository=name.repository,
            commit=_commit(info.sha),
            cache=cache,
            sizes={
                each.rfilename: each.size or 0
                for each in info.siblings or ()
                if not {"", ".."} & set(each.rfilename.split("/"))
            },
            on_progress=on_progress,
        )
        fetching.run(name.choice)
        # Last: so the name stands for the commit once it is whole.
        write_whole(cache / folder_of(name.repository) / "refs" / name.revision, fetching.commit)
    found = find_model(f"hf://{name}", hub_cache=cache)
    if isinstance(found, NotCached):
        raise CheckpointError(f"{name} was fetched, but is incomplete: {found.lacking}")
    return found


def _check_online(wanted: NotCached) -> None:
    _report_nothing()
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(
            f"{wanted.name}: {wanted.lacking}{wanted.near}",
            remedy="Hugging Face is not asked while HF_HUB_OFFLINE is set: unset it, or copy the "
            "repository's folder into the cache",
        )


def _commit(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{40,64}", value):
        raise CheckpointError("the server that answers is not Hugging Face; check HF_ENDPOINT")
    return value


@dataclass(kw_only=True)
class _Fetching:
    """The download of one commit's files into the cache."""

    hub: Any
    repository: str
    commit: str
    cache: Path
    sizes: Mapping[str, int]
    """Bytes of each file of the repository, by name."""
    on_progress: OnProgress
    done: int = 0
    total: int = field(default=0, init=False)

    @property
    def folder(self) -> Path:
        return self.cache / folder_of(self.repository)

    def run(self, choice: str | None) -> None:
        files = wanted_files(self.sizes, chosen_gguf(self.sizes, choice))
        if files[-1] == INDEX_FILE:
            index = self._linked(INDEX_FILE)
            try:
                files += indexed_files(index)
            except StoreError as error:
                raise CheckpointError(str(error)) from error
        if absent := [each for each in files if each not in self.sizes]:
            raise CheckpointError(
                f"{self.repository} lacks {printable(absent[0], 200)}: it is incomplete there"
            )
        missing = [
            each for each in files if not (self.folder / "snapshots" / self.commit / each).is_file()
        ]
        self.total = sum(self.sizes[each] for each in missing)
        self._check_room()
        if CONFIG in files:
            self._check_family()
        for file in missing:
            if _LARGE_BYTES <= self.sizes[file] <= _MOST_PLAIN_BYTES:
                self._large(file)
            else:
                self.done += self.sizes[file]
            self._linked(file)
            self._tell()

    def _check_family(self) -> None:
        """Raises CheckpointError for a model that Edge cannot run, before gigabytes are fetched."""
        config = self._linked(CONFIG)
        read_family(read_json(config), source=f"{CONFIG} of {self.repository}")

    def _check_room(self) -> None:
        unfinished = sum(
            path.stat().st_size for path in (self.folder / "blobs").glob(f"*{UNFINISHED}")
        )
        self.cache.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(self.cache).free
        lacking = self.total - unfinished + _SPARE_DISK_BYTES - free_bytes
        if lacking > 0:
            raise CapacityError(
                f"{self.repository} takes {format_size(self.total)}, and the disk of {self.cache} "
                f"has {format_size(free_bytes)} free",
                remedy=f"free {format_size(lacking)} more, or put the cache elsewhere "
                "(HF_HUB_CACHE)",
            )

    def _linked(self, file: str) -> Path:
        """The file in the commit's folder; downloaded as a whole if it is not in the cache."""
        return Path(
            self.hub.hf_hub_download(
                self.repository, file, revision=self.commit, cache_dir=self.cache
            )
        )

    def _large(self, file: str) -> None:
        """Download a large file to its place in the hub's cache; resumes a partial one."""
        url = self.hub.hf_hub_url(self.repository, file, revision=self.commit)
        described = self.hub.get_hf_file_metadata(url)
        etag, size = described.etag or "", described.size
        if size is None or not re.fullmatch(r"[\w-]{1,128}", etag):
            return  # the hub's client knows how to fetch it
        blob = self.folder / "blobs" / etag
        blob.parent.mkdir(parents=True, exist_ok=True)
        with only_writer(blob.parent, self._tell):
            if not blob.exists():
                part = blob.with_name(f"{etag}{UNFINISHED}")
                self._receive(url, part, size)
                if len(etag) == hashlib.sha256().digest_size * 2:
                    self._verify(part, etag, file)
                part.replace(blob)
        self.done += size

    def _receive(self, url: str, part: Path, size: int) -> None:
        headers = {**self.hub.utils.build_hf_headers(), "Accept-Encoding": "identity"}
        part.touch()
        while True:
            with _Counted(part, self._tell) as file:
                have = file.seek(0, io.SEEK_END)
                if have > size:
                    have = file.seek(0)
                    file.truncate()
                try:
                    self.hub.file_download.http_get(
                        url, file, resume_size=have, headers=headers, expected_size=size
                    )
                    return
                except (EdgeError, Stopped, self.hub.errors.HfHubHTTPError):
                    raise
                except Exception:  # the errors of a broken connection depend on the hub's version
                    if file.tell() <= have or shutil.disk_usage(self.cache).free < size - have:
                        raise

    def _verify(self, part: Path, digest: str, file: str) -> None:
        found = hashlib.sha256()
        with part.open("rb", buffering=0) as opened:
            while read := opened.read(_READ_BYTES):
                found.update(read)
                self._tell()
        if found.hexdigest() != digest:
            part.unlink()
            raise CheckpointError(
                f"{printable(file, 200)} of {self.repository} arrived damaged and was removed",
                remedy="fetch it again",
            )

    def _tell(self, more: int = 0) -> None:
        self.on_progress(
            Progress(
                phase="download", peer=self.repository, done=self.done + more, total=self.total
            )
        )


class _Counted(io.BufferedRandom):
    """A file that reports its length as it grows."""

    def __init__(self, path: Path, on_bytes: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path, "r+"))
        self._on_bytes = on_bytes

    def write(self, content: Any) -> int:
        written = super().write(content)
        self._on_bytes(self.tell())
        return written


@contextlib.contextmanager
def _quiet(hub: Any) -> Iterator[None]:
    """Silence the hub's own bars and messages, which would repeat Edge's."""
    log, utils = hub.utils.logging, hub.utils
    level = log.get_verbosity()
    may_change = hub.constants.HF_HUB_DISABLE_PROGRESS_BARS is None
    had_bars = may_change and not utils.are_progress_bars_disabled()
    log.set_verbosity_error()
    if had_bars:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if had_bars:
            utils.enable_progress_bars()


@contextlib.contextmanager
def _told(hub: Any, wanted: NotCached) -> Iterator[None]:
    """Errors of the hub and the network as Edge's, with a remedy."""
    name, place, errors = wanted.name, hub.constants.ENDPOINT, hub.errors
    log_in = "log in there (`hf auth login`), or set HF_TOKEN"
    try:
        yield
    except (EdgeError, Stopped):
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name} needs its terms to be accepted",
            remedy=f"accept them at {place}/{name.repository}, then {log_in}",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name.repository} has no branch, tag or commit {name.revision} at {place}",
            remedy="check it, or leave it out",
        ) from error
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        if code in _NOT_FOR_YOU:
            raise CheckpointError(
                f"{place} has no model {name.repository} for you, and "
                f"{wanted.lacking}{wanted.near}",
                remedy=f"check its name; if it is private, {log_in}",
            ) from error
        raise NetworkError(
            f"{place} answers {code} for {name}, and {wanted.lacking}{wanted.near}",
            remedy="try again later",
        ) from error
    except Exception as error:  # the network's errors are those of the hub's own client
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise CapacityError(
                f"the disk filled up while {name} was fetched",
                remedy="free some: the same command goes on",
            ) from error
        if isinstance(error, OSError) and error.filename is not None:
            raise
        if isinstance(error, ImportError):  # of what the hub's client needs for this proxy
            raise NetworkError(
                f"{name} could not be fetched from {place} ({printable(str(error), 200)})",
                remedy="for a SOCKS proxy, pip install 'httpx[socks]'; or set HTTPS_PROXY to an "
                "HTTP proxy and leave out ALL_PROXY",
            ) from error
        raise NetworkError(
            f"{name} could not be fetched from {place} ({printable(str(error), 200)}), and "
            f"{wanted.lacking}{wanted.near}",
            remedy="check the network: the same command goes on from what came so far",
        ) from error
