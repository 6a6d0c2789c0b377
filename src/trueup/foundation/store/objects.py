"""Captures on object storage: pushed from a local folder, the spool, while they are recorded, and fetched into one to be read.

::

    s3://bucket/run/manifest.json         put by whoever comes first, and never replaced
                    rank-00000/lock       likewise: it says whose rank this is
                    rank-00000/...        the files of docs/format.md under their names
                    index/0000.json       what one spool has put: name, size, xxh3_64; a spool for each node

Object storage has no rename and no append, and lists slowly. So a file is put whole, once it has its name in the spool; what an
index names is there; and nobody lists: a reader asks for ``index/0000.json`` and the next ones until there is none. A push that
was killed is gone on with by the next one (`trueup push`), and until an index is complete a reader says what is missing.
Of payload only the headers are fetched: a tensor's bytes come when somebody looks at it (`Payload`).
Who may do this is known from the environment alone (``AWS_...``, ``GOOGLE_...``, ``AZURE_...``); nothing of it is written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from trueup.foundation.model import TrueupError
from trueup.foundation.progress import advance
from trueup.foundation.store import durable, layout
from trueup.foundation.store.durable import side_by_side

NAME = re.compile(
    r"manifest\.json|processes/[0-9]{1,10}\.json|rank-[0-9]{5,9}/(?:lock|manifest\.json|(?:sites|shadow|series|packed)-[0-9]{4,9}\.parquet"
    r"|tensors-[0-9]{4,9}\.safetensors|step-[0-9]{6,9}/records-[0-9]{4,9}\.parquet)"
)
"""All files that a capture has: nothing else is put, or believed of an index."""
STATE = ".pushed.json"  # in the spool: which index is its own
INDEX_LIMIT = 256 * 2**20  # largest index that is read, in bytes
AT_ONCE = 256  # files after which the index is written: what a killed push puts again
WORKERS = 16
TRIES = 3  # of the last push of a capture
PERIOD = 1.0  # seconds between pushes while a training records
INCOMPLETE = "what {0} holds was not pushed to its end: {1}; where it was recorded, `trueup push` goes on with it"

Held = dict[str, tuple[int, str]]  # by name: size in bytes, xxh3_64 as 16 hexadecimal digits


class Objects:
    """Objects below a URL; every error is a TrueupError that names it."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
            from obstore.store import from_url
        except ModuleNotFoundError:
            raise TrueupError(f"{url} needs obstore, which is not installed: pip install 'trueup[objects]'") from None
        self.url, self._obstore, self._exists, self._failed = url, obstore, AlreadyExistsError, (BaseError, OSError)
        try:
            self._store = from_url(url)
        except (BaseError, ValueError) as error:
            raise self._error("cannot be opened", error) from None

    def get(self, name: str) -> bytes | None:
        """Return an object of a size that fits into memory, None if there is none."""
        try:
            found = self._obstore.get(self._store, name)
            if found.meta["size"] > INDEX_LIMIT:
                raise TrueupError(f"{self.url}/{name} is not read: expected at most {INDEX_LIMIT} bytes, got {found.meta['size']}")
            return bytes(found.bytes())
        except FileNotFoundError:
            return None
        except self._failed as error:
            raise self._error(f"cannot be read ({name})", error) from None

    def has(self, name: str, size: int) -> bool:
        """Tell whether there is an object of that size."""
        try:
            return bool(self._obstore.head(self._store, name)["size"] == size)
        except FileNotFoundError:
            return False
        except self._failed as error:
            raise self._error(f"cannot be read ({name})", error) from None

    def range(self, name: str, start: int, end: int) -> bytes:
        """Return bytes ``start`` to ``end`` of an object, which are there."""
        try:
            return bytes(self._obstore.get_range(self._store, name, start=start, end=end)) if end > start else b""
        except (*self._failed, FileNotFoundError) as error:
            raise self._error(f"cannot be read ({name})", error) from None

    def put(self, name: str, content: bytes | Path, *, create: bool = False) -> bool:
        """Put an object, of a file in pieces; return False if ``create`` and there is one."""
        try:
            self._obstore.put(self._store, name, content, mode="create" if create else None)
        except self._exists:
            return False
        except self._failed as error:
            raise self._error(f"cannot be written ({name})", error) from None
        return True

    def fetch(self, name: str, path: Path, expected: tuple[int, str]) -> str | None:
        """Write an object to a file, whole or not at all; return what is wrong with it, None if nothing."""
        try:
            found = self._obstore.get(self._store, name)
            if found.meta["size"] != expected[0]:
                return f"has {found.meta['size']} bytes, and {expected[0]} were put"
            path.parent.mkdir(parents=True, exist_ok=True)
            came = xxhash.xxh3_64()
            durable.write_file(path, _counted(found.stream(), came), sync=False)
        except FileNotFoundError:
            return "is missing"
        except self._failed as error:
            raise self._error(f"cannot be read ({name})", error) from None
        if came.hexdigest() != expected[1]:
            path.unlink()
            return "holds other bytes than were put"
        return None

    def _error(self, what: str, error: BaseException) -> TrueupError:
        said = (str(error).splitlines() or [type(error).__name__])[0][:300]
        return TrueupError(f"{self.url} {what}: {said}; check the address, the network and your credentials, and try again")


def _counted(blocks: Iterable[Any], into: xxhash.xxh3_64) -> Iterator[bytes]:
    """Yield the blocks of an object; ``into`` takes their digest as they pass."""
    for block in map(bytes, blocks):
        into.update(block)
        yield block


def digest(path: Path) -> str:
    """Return xxh3_64 of a file's bytes."""
    found = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def cached(kind: str, url: str) -> Path:
    """Return the folder of this user's that stands for a URL, ``spool`` or ``fetched``; ``TRUEUP_CACHE`` says where they are."""
    home = os.environ.get("TRUEUP_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trueup"
    return Path(home).absolute() / kind / f"{re.sub(r'[^A-Za-z0-9._-]', '-', url)[-60:]}-{xxhash.xxh3_64_hexdigest(url.encode())}"


def indices(objects: Objects) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each index and its number. Raises TrueupError where one is damaged."""
    n = 0
    while (text := objects.get(f"index/{n:04d}.json")) is not None:
        try:
            content = json.loads(text)
            held = {str(name): (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
            yield n, {"spool": str(content["spool"]), "complete": content["complete"] is True, "files": held}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise TrueupError(f"{objects.url}/index/{n:04d}.json is damaged: push the capture again from its spool") from None
        n += 1


# ---------------------------------------------------------------- pushing
class Push:
    """Brings a spool to a URL, as often as it is asked to; what was put is not put again."""

    def __init__(self, spool: Path, url: str) -> None:
        self.spool, self.objects = spool, Objects(url)
        self._index: int | None = None
        self._held: Held = {}
        self._id = ""

    def push(self, *, complete: bool) -> int:
        """Put what is new and whole; return the bytes. ``complete``: nothing more will come. Raises TrueupError if the storage
        cannot be reached or belongs to another run: the spool is as it was, and another push goes on."""
        files = sorted(self._files(), key=_order)
        if not (self.spool / layout.MANIFEST).is_file():
            return 0
        if self._index is None:
            self._claim()
        put, since = 0, 0
        new = [name for name in files if self._changed(name)]
        for at in range(0, len(new), AT_ONCE):
            portion = new[at : at + AT_ONCE]
            for kind in dict.fromkeys(map(_order, portion)):  # what refers to others comes after them
                names = [name for name in portion if _order(name) == kind]
                for name, told in zip(names, side_by_side(self._put, names, WORKERS), strict=True):
                    self._held[name] = told
                    put, since = put + told[0], since + 1
            self._write_index(complete=False)
        if since or complete:
            self._write_index(complete=complete)
        return put

    def _files(self) -> Iterator[str]:
        for folder, _, names in os.walk(self.spool):
            for name in names:
                path = Path(folder, name)
                known = path.relative_to(self.spool).as_posix()
                if NAME.fullmatch(known) and path.is_file() and not path.is_symlink():
                    yield known

    def _changed(self, name: str) -> bool:
        held = self._held.get(name)
        path = self.spool / name
        return held is None or (name.endswith(".json") and (path.stat().st_size, digest(path)) != held)

    def _put(self, name: str) -> tuple[int, str]:
        path = self.spool / name
        if name.endswith((".json", layout.LOCK)):  # a manifest may be replaced meanwhile: what is told is what is put
            content = path.read_bytes()
            told = len(content), xxhash.xxh3_64_hexdigest(content)
            once = name in (layout.MANIFEST,) or name.endswith(f"/{layout.LOCK}")
            if not self.objects.put(name, content, create=once):
                there = self.objects.get(name)
                self._check(name, content, there)
                told = len(there or b""), xxhash.xxh3_64_hexdigest(there or b"")
            return told
        told = path.stat().st_size, digest(path)
        self.objects.put(name, path)
        return told

    def _check(self, name: str, mine: bytes, theirs: bytes | None) -> None:
        """Accept what somebody else has put if it is the same, or the manifest of the same run."""
        if mine == theirs:
            return
        runs = [_run(content) for content in (mine, theirs or b"")]
        if name == layout.MANIFEST and runs[0] is not None and runs[0] == runs[1]:
            return
        raise TrueupError(
            f"{self.objects.url} holds another capture: its {name} is another run's or another node's\n"
            f"  next:     choose another URL; what was recorded lies in {self.spool}"
        )

    def _claim(self) -> None:
        """Find this spool's index, or take the first that nobody has."""
        state = self.spool / STATE
        with suppress(OSError, TrueupError):
            known = layout.read_object(self.spool, state)
            self._id = str(known["spool"]) if known.get("url") == self.objects.url else ""
        if not self._id:
            self._id = os.urandom(8).hex()
            durable.write_json(state, {"url": self.objects.url, "spool": self._id})
        self._held = {}
        self._put(layout.MANIFEST)
        n = 0
        for n, content in indices(self.objects):
            if content["spool"] == self._id:
                self._index, self._held = n, content["files"]
                return
            n += 1
        for name in self._files():
            if name.endswith(f"/{layout.LOCK}"):  # a node that is refused must not leave an index that nobody ever completes
                self._put(name)
        while not self.objects.put(_index_name(n), self._index_text(complete=False), create=True):
            n += 1
        self._index = n

    def _write_index(self, *, complete: bool) -> None:
        self.objects.put(_index_name(self._index or 0), self._index_text(complete=complete))

    def _index_text(self, *, complete: bool) -> bytes:
        return json.dumps({"spool": self._id, "complete": complete, "files": self._held}, separators=(",", ":")).encode()


def _index_name(n: int) -> str:
    return f"index/{n:04d}.json"


def _run(content: bytes) -> Any:
    with suppress(ValueError, RecursionError, AttributeError):
        return json.loads(content).get("run")
    return None


def _order(name: str) -> int:
    """Return when a file is put: what a rank's records refer to before them, its manifest after all."""
    if name == layout.MANIFEST or name.endswith(f"/{layout.LOCK}"):
        return 0
    if name.endswith(".json"):
        return 3
    return 2 if "/records-" in name or "/packed-" in name else 1


class Pusher:
    """Pushes a spool while something records into it, on a thread; errors wait for `finish`, for the spool keeps everything."""

    def __init__(self, spool: Path, url: str, say: Callable[[str], None]) -> None:
        self._push, self._say = Push(spool, url), say
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trueup-pusher", daemon=True)

    def __enter__(self) -> Pusher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        failed = ""
        while not self._over.wait(PERIOD):
            try:
                self._push.push(complete=False)
            except (TrueupError, OSError) as error:
                if str(error) != failed:
                    self._say(f"not pushed yet, and kept in {self._push.spool}: {error}")
                failed = str(error)

    def finish(self) -> None:
        """Put the rest, and say that this is all; raises TrueupError if that fails thrice."""
        for left in reversed(range(TRIES)):
            try:
                self._push.push(complete=True)
                return
            except (TrueupError, OSError) as error:
                if not left:
                    raise TrueupError(
                        f"{error}\n  next:     all of it lies in {self._push.spool}\n"
                        f"            trueup push {self._push.spool} {self._push.objects.url}"
                    ) from None


@contextmanager
def spooled(url: str, *, shared: bool, say: Callable[[str], None]) -> Iterator[Path]:
    """Give a folder of this machine to record into; it is pushed meanwhile, and removed once all of it is at the URL. ``shared``:
    other nodes record into the same URL. Raises TrueupError before anything runs if the URL cannot be used or holds a capture, and
    at the end if not all was pushed: the folder keeps it."""
    folder = cached("spool", url).with_name(f"{cached('spool', url).name}-{os.getpid()}")
    if not shared and Objects(url).get(layout.MANIFEST) is not None:
        raise TrueupError(f"{url} holds a capture\n  next:     choose another URL: nothing on object storage is written over")
    folder.mkdir(parents=True, exist_ok=True)
    pusher = Pusher(folder, url, say)
    with pusher:
        yield folder
    pusher.finish()
    shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------- reading
HEAD = 1 << 16  # bytes of a segment that are read first: its header, as a rule
RANGES = 16  # tensors of a segment after which all of it is fetched: a request takes as long as a megabyte


class Payload:
    """The payload segments of a fetched capture: files of the size that was put, with nothing but a header in them at first."""

    def __init__(self, url: str, folder: Path, held: Held) -> None:
        self.url, self.folder, self._held = url, folder, held
        self._brought: dict[str, set[int]] = {}
        self._files: dict[str, int] = {}  # the inode of each: another process may fetch all of one

    def outline(self, objects: Objects, name: str) -> str | None:
        """Make the file of a segment; return what is wrong with it, None if nothing."""
        size = self._held[name][0]
        if not objects.has(name, size):
            return f"is missing, or not of the {size} bytes that were put"
        head = objects.range(name, 0, min(size, HEAD))
        length = 8 + int.from_bytes(head[:8], "little")
        if len(head) < length <= size:
            head += objects.range(name, len(head), length)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.is_file() and not path.is_symlink() and path.stat().st_size == size and _begins(path, head)):
            durable.write_file(path, [head], sync=False)
            os.truncate(path, size)
        self._files[name] = path.stat().st_ino
        return None

    def bring(self, path: Path, start: int, end: int, *, checked: bool) -> bool:
        """Bring a tensor's bytes into the file of its segment; return whether that is another file now, for all of it was fetched:
        so is a segment of which many tensors are wanted, or one whose record has no digest (``checked``) to hold them against.
        Raises TrueupError if the storage cannot be reached, or holds other bytes."""
        name = path.relative_to(self.folder).as_posix()
        told = self._held.get(name)
        if told is None:
            return False
        known, self._files[name] = self._files.get(name), path.stat().st_ino
        if checked and start in self._brought.get(name, ()) and known == self._files[name]:
            return False
        objects, brought = Objects(self.url), self._brought.setdefault(name, set())
        try:
            if not checked or len(brought) >= RANGES:
                if (wrong := objects.fetch(name, path, told)) is not None:
                    raise TrueupError(f"{self.url}/{name} {wrong}: push the capture again from its spool")
                del self._held[name]
                return True
            content = objects.range(name, start, end)
            with path.open("r+b") as file:
                file.seek(start)
                file.write(content)
        except OSError as error:
            raise TrueupError(f"{path} cannot be written: {error.strerror}; name another folder in TRUEUP_CACHE") from None
        brought.add(start)
        return known != self._files[name]


def fetched(url: str) -> tuple[Path, list[str], Payload]:
    """Bring a capture into this user's cache, where it is read; return the folder, what is missing or damaged there, and what
    brings tensors.

    Every file is held against the size and the digest that were put; one that is in the cache already is not fetched again.
    Raises TrueupError if there is no capture, the storage cannot be reached, or the disk has no room.
    """
    objects, folder = Objects(url), cached("fetched", url)
    wanted: Held = {}
    problems: list[str] = []
    found = list(indices(objects))
    if not found:
        raise TrueupError(f"{url} is not a capture: expected index/0000.json in it, got none; check the URL, or push the capture")
    for n, content in found:
        if not content["complete"]:
            problems.append(INCOMPLETE.format(url, f"{_index_name(n)} is open"))
        strange = [name for name in content["files"] if not NAME.fullmatch(name)]
        problems += [f"{_index_name(n)} names {name[:80]!r}, which is no file of a capture; skipped" for name in strange[:8]]
        wanted |= {name: told for name, told in content["files"].items() if NAME.fullmatch(name)}
    folder.mkdir(parents=True, exist_ok=True)
    durable.write_json(folder / layout.FETCHED, {"url": url})
    for path in [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]:
        if path.relative_to(folder).as_posix() not in {*wanted, layout.FETCHED}:
            path.unlink()  # of a capture that was there before
    missing = [name for name, told in sorted(wanted.items()) if not _is_there(folder / name, told)]
    segments = {name: wanted[name] for name in missing if "/tensors-" in name}
    payload = Payload(url, folder, segments)
    room, size = shutil.disk_usage(folder).free, sum(wanted[name][0] for name in missing if name not in segments)
    if size > room:
        raise TrueupError(
            f"{url} is not fetched: it takes {size:,} bytes, and {folder} has room for {room:,}\n"
            "  next:     name a folder with more room in TRUEUP_CACHE"
        )
    for at in range(0, len(missing), AT_ONCE):
        advance("fetching", "files", at, len(missing))
        names = missing[at : at + AT_ONCE]
        wrong = side_by_side(
            lambda name: (
                payload.outline(objects, name) if name in segments else objects.fetch(name, folder / name, wanted[name])
            ), names, WORKERS,
        )  # fmt: skip
        problems += [f"{name} {why}; its contents are missing" for name, why in zip(names, wrong, strict=True) if why is not None]
    return folder, problems, payload


def url_of_folder(folder: Path) -> str | None:
    """Return the URL that a folder of the cache stands for, None for any other: what lies there lacks tensors."""
    with suppress(OSError, TrueupError, KeyError, TypeError):
        url = layout.url_of(layout.read_object(folder, folder / layout.FETCHED)["url"])
        return url if url is not None and cached("fetched", url) == folder.absolute() else None
    return None


def _begins(path: Path, head: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(head)) == head


def _is_there(path: Path, told: tuple[int, str]) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == told[0] and digest(path) == told[1]
