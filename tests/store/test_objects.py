"""Captures on object storage, against a server of S3 on the loopback: pushed, killed, gone on with, fetched."""

from __future__ import annotations

import base64
import json
import logging
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueup import compare, open_capture
from trueup.doors.cli import main
from trueup.foundation.kernels import digest as digest_of
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Writer, objects
from trueup.foundation.store.layout import url_of
from trueup.foundation.store.objects import Objects, Push

pytest.importorskip("obstore", reason="object storage needs obstore, which the extra dev installs")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    moto = pytest.importorskip("moto.server", reason="a server of S3 needs moto, which the extra dev installs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket of this test's; returns its URL."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "s3cret-of-mine",
        "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true", "TRUEUP_CACHE": str(tmp_path / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    name = f"test-{abs(hash(request.node.name)):x}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT"), timeout=120)
    return f"s3://{name}"


def recorded(folder: Path, *, ranks: int = 2, factor: float = 1.0, run: str = "r1") -> Path:
    """Write a small capture: each rank multiplies once."""
    root = {"run": run, "levels": ["aten"], "detail": "stats", "config": {}}
    manifest = {"framework": "torch", "world_size": ranks, "steps_over": True}
    for writer in [Writer(folder, rank, root, manifest) for rank in range(ranks)]:
        slots = {"input.0": 2.0, "output.0": 2.0 * factor}
        names = {"op": "aten::mul", "level": "aten", "phase": "forward", "scope": "", "dtype": "float32", "device": "cpu"}
        columns: dict[str, list[Any]] = {name: [value, value] for name, value in names.items()}
        columns |= {"seq": [0, 0], "ordinal": [0, 0], "slot": list(slots), "shape": [[1], [1]], "numel": [1, 1]}
        columns |= {name: list(slots.values()) for name in ("min", "max", "mean", "l2")}
        columns |= {f"n_{kind}": [0, 0] for kind in ("nan", "posinf", "neginf", "zero", "subnormal", "saturated")}
        columns |= {"digest": [f"{int(value * 1000):016x}" for value in slots.values()]}
        columns |= {"sketch": [[value] + [0.0] * 63 for value in slots.values()]}
        writer.write_records(0, columns)
        writer.close("complete")
    return folder


def test_a_capture_is_pushed_and_compared_where_it_lies(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, factor in (("a", 1.0), ("b", 1.0), ("c", 1.5)):
        folder = recorded(tmp_path / name, factor=factor)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert main(["push", str(folder), f"{bucket}/{name}", "--json", "-"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["capture"], told["url"]) == (str(folder), f"{bucket}/{name}")
        assert 0 < told["bytes"] <= size
    assert main(["compare", f"{bucket}/a", f"{bucket}/b"]) == 0
    assert main(["compare", f"{bucket}/a", f"{bucket}/c", "-o", str(tmp_path / "report")]) == 1
    assert main(["show", f"{bucket}/c"]) == 0
    assert "aten::mul" in capsys.readouterr().out
    held = open_capture(f"{bucket}/c")
    assert (len(held.ranks), held.rows, held.problems) == (2, 4, [])
    texts = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"s3cret-of-mine" not in texts


class OneOfTwo(BaseHTTPRequestHandler):
    """What Google's and Azure's storage answer to what a capture asks: objects put whole, once if so asked, and parts of them."""

    protocol_version = "HTTP/1.1"
    held: dict[str, bytes]
    listed: list[str]

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **further: str) -> None:
        self.send_response(status)
        told = {"ETag": '"1"', "Last-Modified": "Sat, 28 Nov 2026 12:00:00 GMT", "Content-Length": str(len(body))}
        for name, value in (told | further).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        once = {"If-None-Match": 409, "x-goog-if-generation-match": 412}
        refused = next((status for name, status in once.items() if name in self.headers and self.path in self.held), 0)
        if not refused:
            self.held[self.path] = body
        self._answer(refused or 201)

    def do_GET(self) -> None:
        self.listed += [self.path] if "?" in self.path else []
        body, wanted = self.held.get(self.path), self.headers["Range"] or self.headers["x-ms-range"]
        if body is None:
            self._answer(404)
        elif wanted:
            start, end = map(int, wanted.removeprefix("bytes=").split("-"))
            part = body[start : end + 1]
            self._answer(206, part, Content_Range=f"bytes {start}-{start + len(part) - 1}/{len(body)}")
        else:
            self._answer(200, body)

    do_HEAD = do_GET


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_google_and_azure_are_asked_the_same(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = type("Stub", (OneOfTwo,), {"held": {}, "listed": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    key = {"gcs_base_url": address, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    for name, value in {
        "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "AZURE_STORAGE_ACCOUNT_NAME": "someone", "AZURE_ENDPOINT": address,
        "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"s3cret-of-mine").decode(), "AZURE_ALLOW_HTTP": "true",
        "TRUEUP_CACHE": str(tmp_path / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for name, factor in (("a", 1.0), ("b", 1.0), ("c", 1.5)):
        assert main(["push", str(recorded(tmp_path / name, factor=factor)), f"{scheme}://bucket/{name}"]) == 0
    assert main(["compare", f"{scheme}://bucket/a", f"{scheme}://bucket/b"]) == 0
    assert main(["compare", f"{scheme}://bucket/a", f"{scheme}://bucket/c"]) == 1
    with pytest.raises(TrueupError, match="holds another capture"):
        Push(recorded(tmp_path / "d", run="r2"), f"{scheme}://bucket/a").push(complete=True)
    assert not stub.listed  # nobody lists
    assert b"s3cret" not in b"".join(stub.held.values())
    server.shutdown()
    server.server_close()


def test_only_tensors_that_are_looked_at_are_fetched(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [np.full(50_000, k, np.float32) for k in range(24)]
    digests = [f"{digest_of(array):016x}" for array in arrays]
    writer = Writer(tmp_path / "run", 0, {"run": "r", "levels": ["aten"], "detail": "tensor", "config": {}}, {"framework": "torch"})
    places = [writer.add_payload(digest, "float32", (50_000,), array) for digest, array in zip(digests, arrays, strict=True)]
    columns: dict[str, list[Any]] = {"seq": [0] * 24, "slot": [f"input.{k}" for k in range(24)], "op": ["aten::cat"] * 24}
    columns |= {name: list(of) for name, of in zip(("payload_segment", "payload_key"), zip(*places, strict=True), strict=True)}
    writer.write_records(0, columns)
    writer.close("complete")
    Push(tmp_path / "run", f"{bucket}/run").push(complete=True)
    came, whole = list[int](), list[str]()
    some, all_of_it = Objects.range, Objects.fetch
    monkeypatch.setattr(Objects, "range", lambda self, *given: (found := some(self, *given), came.append(len(found)))[0])
    monkeypatch.setattr(Objects, "fetch", lambda self, name, *given: (whole.append(name), all_of_it(self, name, *given))[1])
    capture = open_capture(f"{bucket}/run")
    assert (capture.problems, came) == ([], [objects.HEAD])
    for k in (3, 7, 3):
        assert (capture.payload(0, *places[k], digest=digests[k]) == arrays[k]).all()
    assert came[1:] == [200_000, 200_000]
    assert not any("tensors" in name for name in whole)
    second = open_capture(capture.path)  # at the same time, as a report opens it again
    for k in (5, 3):
        for one in (second, capture):
            assert (one.payload(0, *places[k], digest=digests[k]) == arrays[k]).all()
    assert second.payload(0, *places[9], digest=None)[0] == 9  # nothing to hold it against: all of it, and the other reads on
    assert (capture.payload(0, *places[11], digest=digests[11]) == arrays[11]).all()
    came[:], whole[:] = came[:2], []
    monkeypatch.setenv("TRUEUP_CACHE", str(tmp_path / "one more"))
    capture = open_capture(f"{bucket}/run")
    came[:] = came[:1]
    for k in range(24):  # many of them: all of it, once
        assert (capture.payload(0, *places[k], digest=digests[k]) == arrays[k]).all()
    segment = "rank-00000/tensors-0000.safetensors"
    assert (len(came), [name for name in whole if "tensors" in name]) == (1 + objects.RANGES, [segment])
    Objects(f"{bucket}/run").put(segment, b"x" * 4_900_000)
    monkeypatch.setenv("TRUEUP_CACHE", str(tmp_path / "another"))
    assert any("tensors-0000.safetensors is missing, or not of the" in text for text in open_capture(f"{bucket}/run").lost)


def test_a_killed_push_is_gone_on_with(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it put is in no complete index, so nothing of it is called aligned; the next push puts the rest."""
    whole, half = recorded(tmp_path / "whole"), recorded(tmp_path / "half")
    Push(whole, f"{bucket}/whole").push(complete=True)
    put, names = Objects.put, list[str]()

    def dying(self: Objects, name: str, content: Any, **more: Any) -> bool:
        if name.startswith("rank-00001/") and not name.endswith("lock"):
            raise KeyboardInterrupt
        names.append(name)
        return put(self, name, content, **more)

    monkeypatch.setattr(objects, "WORKERS", 1)
    monkeypatch.setattr(objects, "AT_ONCE", 2)
    monkeypatch.setattr(Objects, "put", dying)
    with pytest.raises(KeyboardInterrupt):
        Push(half, f"{bucket}/half").push(complete=True)
    result = compare(f"{bucket}/whole", f"{bucket}/half")
    assert result.verdict == "inconclusive"
    assert "was not pushed to its end" in result.sentence
    done = [name for name in names if name.startswith("rank-0000")]
    names.clear()

    def noting(self: Objects, name: str, content: Any, **more: Any) -> bool:
        names.append(name)
        return put(self, name, content, **more)

    monkeypatch.setattr(Objects, "put", noting)
    Push(half, f"{bucket}/half").push(complete=True)
    assert compare(f"{bucket}/whole", f"{bucket}/half").verdict == "aligned"
    assert done
    assert not set(done) & set(names), "put twice"


def test_each_node_pushes_its_ranks_and_nobody_lists(bucket: str, tmp_path: Path) -> None:
    both = recorded(tmp_path / "both")
    for rank in range(2):
        spool = tmp_path / f"spool-{rank}"
        spool.mkdir()
        (spool / "manifest.json").write_bytes((both / "manifest.json").read_bytes())
        (both / f"rank-0000{rank}").rename(spool / f"rank-0000{rank}")
        Push(spool, f"{bucket}/run").push(complete=True)
        lacks = [text for text in open_capture(f"{bucket}/run").problems if "rank 1 is missing" in text]
        assert len(lacks) == 1 - rank
    assert Objects(f"{bucket}/run").get("index/0001.json") is not None


def test_a_url_of_another_run_is_left_alone(bucket: str, tmp_path: Path) -> None:
    Push(recorded(tmp_path / "first"), f"{bucket}/run").push(complete=True)
    before = Objects(f"{bucket}/run").get("index/0000.json")
    with pytest.raises(TrueupError, match="holds another capture"):
        Push(recorded(tmp_path / "second", run="r2"), f"{bucket}/run").push(complete=True)
    with pytest.raises(TrueupError, match="holds another capture: its rank-00000/lock"):
        again = recorded(tmp_path / "again")
        lock = again / "rank-00000" / "lock"
        lock.write_text(json.dumps(json.loads(lock.read_text()) | {"host": "elsewhere"}))
        Push(again, f"{bucket}/run").push(complete=True)
    assert Objects(f"{bucket}/run").get("index/0000.json") == before
    assert open_capture(f"{bucket}/run").problems == []


def test_objects_that_were_changed_or_lost_are_named(bucket: str, tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run")
    Push(folder, f"{bucket}/a").push(complete=True)
    there = Objects(f"{bucket}/a")
    records = "rank-00001/step-000000/records-0000.parquet"
    there.put(records, b"x" * (folder / records).stat().st_size)
    index = json.loads(there.get("index/0000.json") or b"")
    index["files"] |= {"../../escaped": [1, "0" * 16], "rank-00000/sites-0000.parquet": [3, "0" * 16]}
    there.put("index/0000.json", json.dumps(index).encode())
    problems = " ".join(open_capture(f"{bucket}/a").lost)
    assert f"{records} holds other bytes than were put" in problems
    assert "names '../../escaped', which is no file of a capture" in problems
    assert "rank-00000/sites-0000.parquet is missing" in problems
    assert compare(folder, f"{bucket}/a").verdict == "inconclusive"
    assert not list(tmp_path.rglob("escaped"))


def test_a_training_is_captured_to_a_url(bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nx = torch.ones(4, requires_grad=True)\n(x * 2).sum().backward()\n")
    assert main(["capture", "-o", f"{bucket}/run", "--level", "api", "--", sys.executable, str(script)]) == 0
    assert open_capture(f"{bucket}/run").rows > 0
    assert not list((tmp_path / "cache" / "spool").iterdir())  # all of it is there
    assert main(["capture", "-o", f"{bucket}/run", "--", sys.executable, "-c", "raise SystemExit(7)"]) == 2
    assert "holds a capture" in capfd.readouterr().err


def test_a_server_that_is_gone_costs_nothing(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(objects, "PERIOD", 0.01)
    with pytest.raises(TrueupError, match="trueup push"), objects.spooled(f"{bucket}/run", shared=False, say=said.append) as spool:
        recorded(spool)
        monkeypatch.setattr(Objects, "put", lambda self, name, *_, **__: (_ for _ in ()).throw(self._error(name, OSError("gone"))))
    assert open_capture(spool).rows == 4
    monkeypatch.undo()


@pytest.mark.parametrize("given", ["s3://user:pass@host/run", "s3://bucket/run?token=1", "gs://bucket/../other"])
def test_urls_that_hold_more_are_refused(given: str) -> None:
    with pytest.raises(TrueupError, match="bucket and name") as refused:
        url_of(given)
    assert "pass" not in str(refused.value).replace("passwords", "")


def test_what_is_a_url_and_what_is_a_path() -> None:
    assert url_of(Path("s3://bucket/run/")) == "s3://bucket/run"
    assert url_of("az://c/x") == "az://c/x"
    assert [url_of(path) for path in ("runs/s3", "C:/x", "/s3:/b")] == [None, None, None]
