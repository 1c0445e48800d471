"""A server of the page as a user starts it, and requests to it as any program sends them."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
JOB: dict[str, Any] = {
    "model": "llama3-70b", "cluster": "dgx-h100:8", "global_batch": 512, "seq": 8192, "tp": 8, "pp": 2, "zero": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        return json.loads(self.body)

    @property
    def line(self) -> str:
        """The one line of a refusal."""
        text: str = self.data["error"]["text"]
        assert text and "\n" not in text and "Traceback" not in text
        return text


@dataclass(frozen=True)
class Served:
    """A server; ``folder`` is where it was started, and holds nothing that it may read."""

    port: int
    folder: Path
    process: subprocess.Popen[str]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        """A request as it is written here; headers by their name with _ for -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def post(self, what: str, data: Any, **headers: str) -> Reply:
        return self.ask("POST", f"/api/{what}", json.dumps(data).encode(), content_type="application/json", **headers)


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Served]:
    """`shardwise ui` on a free port, started in ``folder``; ended at the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "shardwise", "ui", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
        assert found, said or process.communicate(timeout=10)[1]
        yield Served(int(found[1]), folder, process)
    finally:
        process.terminate()
        process.communicate(timeout=20)
