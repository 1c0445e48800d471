"""A real server: what it answers, and that hostile requests are refused in one line and change nothing."""

from __future__ import annotations

import gzip
import json
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.running import run_json
from shardwise.api import plan
from shardwise.spec.installation import is_installed
from tables import table
from ui.serving import JOB, Served, serving

pytestmark = pytest.mark.skipif(not is_installed("uvicorn"), reason="the ui extra is not installed")
FLAGS = ("--model", "llama3-70b", "--cluster", "dgx-h100:8", "--global-batch", "512", "--seq", "8192")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("started-here")
    (folder / "secret.json").write_text('{"model_type": "llama"}')
    with serving(folder) as one:
        yield one
    assert sorted(path.name for path in folder.iterdir()) == ["secret.json"], "it wrote a file"


# -- answers -----------------------------------------------------------------------------------------------------


def test_the_page_comes_compressed_and_may_load_nothing_from_elsewhere(served: Served) -> None:
    page = served.ask("GET", "/", accept_encoding="gzip")
    assert page.status == 200 and page.headers["content-encoding"] == "gzip"
    assert b"<!doctype html>" in gzip.decompress(page.body)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert served.ask("GET", "/", if_none_match=page.headers["etag"]).status == 304
    assert served.ask("GET", "/").body.startswith(b"<!doctype html>")


def test_an_analysis_is_that_of_the_command(served: Served) -> None:
    assert served.post("analyze", JOB).data == run_json("analyze", *FLAGS, "--tp", "8", "--pp", "2", "--zero", "1")


def test_the_answer_of_the_page_has_the_figures_of_the_command(served: Served) -> None:
    found = served.post("answer", JOB).data
    printed = run_json("analyze", *FLAGS, "--tp", "8", "--pp", "2", "--zero", "1")
    assert found["verdict"]["predicted_seconds"] == printed["time"]["predicted_seconds"]
    assert found["verdict"]["memory_bytes"] == printed["memory"]["total_bytes"]
    step = found["charts"]["step"]["table"]["rows"]
    assert [row[1] for row in step[:-1]] == [seconds for seconds in printed["time"]["parts"].values() if seconds]
    memory = found["charts"]["memory"]
    assert max(row[-1] for row in memory["table"]["rows"]) == printed["memory"]["total_bytes"]
    assert all(
        lines[0].startswith(f"{one['name']} = ") for one in memory["series"] for lines in one["details"] if lines
    )
    drawn = served.post("timeline", JOB).data["chart"]
    assert drawn["end"] == pytest.approx(printed["time"]["predicted_seconds"])
    assert found["verdict"]["sentence"].startswith("llama3-70b on 64 × h100-sxm: ")


@pytest.mark.slow
def test_a_plan_is_that_of_the_function_and_shows_its_progress(served: Served) -> None:
    asked = {"model": "gpt2", "cluster": "workstation-4090", "global_batch": 16, "seq": 1024, "pareto": "memory",
             "tp": 1, "pp": 1, "cp": 1, "zero": "0,1", "shard_group": "all"}  # fmt: skip
    reply = served.post("plan", asked, accept="text/event-stream")
    events = [one.split(b"\n", 1) for one in reply.body.split(b"\n\n") if one.startswith(b"event")]
    assert reply.headers["content-type"].startswith("text/event-stream")
    kinds = [name for name, _ in events]
    assert kinds[-1] == b"event: result" and b"event: progress" in kinds
    found = json.loads(events[-1][1].removeprefix(b"data: "))
    expected = json.loads(json.dumps(plan(**asked).to_dict()))
    for one in (found, expected):
        one["search"].pop("cpu_seconds")
    assert found == expected
    narrow = {**asked, "zero": 1, "pareto": None}
    assert served.post("plan", narrow).data["job"]["strategy"]["zero"] == 1


@pytest.mark.slow
def test_several_kinds_of_nodes_are_searched(served: Served) -> None:
    """As `plan` does; each of its layouts is a job, with the kinds in its own order."""
    asked = {"model": "gpt2", "cluster": "workstation-4090+workstation-3090", "global_batch": 16, "seq": 1024,
             "tp": 1, "microbatch": 1, "schedule": "1f1b", "recompute": "none"}  # fmt: skip
    found = served.post("plan", asked).data
    kept = {name: asked[name] for name in ("model", "global_batch", "seq")}
    best = found["candidates"][0]
    job = {**kept, "cluster": best["cluster"], **best["strategy"]}
    assert served.post("answer", job).data["verdict"]["predicted_seconds"] == best["predicted_seconds"]
    refused = served.post("plan", {**asked, "pareto": "memory"}).line
    assert refused == "pareto: is not answered for several kinds of nodes; leave it out"


def test_two_layouts_side_by_side(served: Served) -> None:
    data = served.post("compare", {"a": JOB, "b": {**JOB, "tp": 4}}).data
    assert data["changed"] == {"tp": 4, "dp": 8}
    assert data["loss"] == pytest.approx(data["b"]["predicted_seconds"] / data["a"]["predicted_seconds"] - 1)
    assert sum(one["share"] for one in data["parts"]) == pytest.approx(data["loss"])
    assert data["reason"].startswith("B does not fit. B takes ") and "time a token than A" in data["reason"]
    wrong = served.post("compare", {"a": JOB, "b": {**JOB, "tp": 3}})
    assert wrong.status == 422 and wrong.line.startswith("b.strategy.tp: 3 does not divide")


def test_exports_and_the_trace_are_those_of_the_commands(served: Served) -> None:
    exported = served.post("export", {**JOB, "to": "megatron"}).data
    assert exported == run_json("export", *FLAGS, "--tp", "8", "--pp", "2", "--zero", "1", "--to", "megatron")
    events = served.post("trace", JOB).data["traceEvents"]
    assert any(one["name"] == "optimizer" for one in events)
    refused = served.post("trace", {**JOB, "global_batch": 512000}).line
    assert refused.startswith("trace: ") and refused.endswith("give a smaller global_batch")


@pytest.mark.slow
def test_published_runs_name_their_source(served: Served) -> None:
    data = served.post("published", JOB).data
    assert data["own"]["model"] == "llama3-70b" and len(data["runs"]) == 5
    assert all(one["source"] and one["locator"] and one["seconds"] > 0 for one in data["runs"])
    assert [one["distance"] for one in data["runs"]] == sorted(one["distance"] for one in data["runs"])


@pytest.mark.parametrize("what", ["plan", "demo"])
def test_whoever_goes_away_ends_what_he_asked_for(served: Served, what: str) -> None:
    job = {"model": "deepseek-v3", "cluster": "dgx-h100:256", "global_batch": 15360, "seq": 4096}
    asked, before = json.dumps(job if what == "plan" else {}).encode(), temporary_folders()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        head = f"POST /api/{what} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: application/json\r\n"
        head += f"Accept: text/event-stream\r\nContent-Length: {len(asked)}\r\n\r\n"
        connection.sendall(head.encode() + asked)
        assert b"200 OK" in connection.recv(4096)
        assert started_by(served.process.pid) and len(temporary_folders() - before) == (what == "demo")
        if what == "demo":
            assert served.post("demo", {}).line == "demo: a demo is running; wait for it"
    until = time.monotonic() + 20
    while (started_by(served.process.pid) or temporary_folders() - before) and time.monotonic() < until:
        time.sleep(0.1)
    assert started_by(served.process.pid) == [] and temporary_folders() <= before


def test_the_demo_has_no_options(served: Served) -> None:
    asked = served.post("demo", {"model": "llama3-8b"})
    assert (asked.status, asked.line) == (422, "model: is not an option of the demo, which has none; send {}")


def temporary_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("shardwise-demo-*"))


def started_by(parent: int) -> list[int]:
    """The processes that a server has started and that go on."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(one) for one in listed.split()]


# -- hostile requests --------------------------------------------------------------------------------------------


@table(
    ("what", "headers", "status", "said"),
    [
        ("other host", {"Host": "evil.example"}, 421, "is not this server"),
        ("name of another", {"Host": "127.0.0.1.evil.example"}, 421, "is not this server"),
        ("name like ours", {"Host": "localhost.evil.example:80"}, 421, "is not this server"),
        ("no port", {"Host": "localhost:x"}, 421, "is not this server"),
        ("page on another port", {"Origin": "http://127.0.0.1:1"}, 403, "may not use this server"),
        ("no host", {"Host": ""}, 421, "is not this server"),
        ("other origin", {"Origin": "http://evil.example"}, 403, "may not use this server"),
        ("null origin", {"Origin": "null"}, 403, "may not use this server"),
        ("https origin", {"Origin": "https://127.0.0.1"}, 403, "may not use this server"),
        ("form", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "is not JSON"),
        ("text", {"Content-Type": "text/plain"}, 415, "is not JSON"),
        ("long", {"Content-Length": "10000000"}, 413, "are more than"),
        ("negative", {"Content-Length": "-1"}, 400, ""),
    ],
)
def test_who_may_not_ask_is_refused(served: Served, what: str, headers: dict[str, str], status: int, said: str) -> None:
    sent = {"Host": f"127.0.0.1:{served.port}", "Content-Type": "application/json", **headers}
    body = json.dumps(JOB).encode()
    sent.setdefault("Content-Length", str(len(body)))
    request = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(f"POST /api/analyze HTTP/1.1\r\n{request}\r\n".encode() + body)
        connection.settimeout(20)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
            if b"}}" in answer or (status == 400 and answer):
                break
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert said.encode() in answer and b"predicted" not in answer
    assert served.post("analyze", JOB).status == 200


def test_a_port_that_is_forwarded_is_ours(served: Served) -> None:
    """`ssh -L 9000:127.0.0.1:8765`: the browser names the port that it knows."""
    reply = served.post("answer", JOB, host="localhost:9000", origin="http://localhost:9000")
    assert reply.status == 200


def test_a_body_of_ten_megabytes_is_not_read(served: Served) -> None:
    for chunked in (False, True):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.settimeout(20)
            length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 10000000"
            head = f"POST /api/answer HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}{length}\r\n\r\n".encode())
            piece = b" " * 100_000
            try:
                for _ in range(100):
                    connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
            except OSError:
                pass  # it has closed the connection
            assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../app.py", "/assets/..%2fapp.py", "/assets/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "/../../etc/passwd",
        "//etc/passwd", "/assets//etc/passwd", "/assets/index.html%00.js", "/secret.json", "/assets/secret.json",
        "/assets/", "/api/", "/api/answer/../../secret.json", "/%", "/assets/%ff",
    ],
)  # fmt: skip
def test_no_address_leads_to_a_file(served: Served, path: str) -> None:
    reply = served.ask("GET", path)
    assert reply.status in (404, 405)
    assert reply.line and b"root:" not in reply.body and b"model_type" not in reply.body


HUGE: dict[str, Any] = {
    "tp": 10**30, "pp": 10**17, "cp": -1, "ep": 1e308, "microbatch": 10**12, "global_batch": 10**25, "seq": 10**16,
    "cluster": "dgx-h100:999999999999", "zero": 99, "interleave": 2**63, "stage_layers": [1] * 30_000,
}  # fmt: skip


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_number_is_refused_at_once(served: Served, name: str) -> None:
    reply = served.post("answer", {**JOB, name: HUGE[name]})
    assert reply.status == 422 and len(reply.line) < 400
    assert reply.data["error"]["field"]


@pytest.mark.slow
def test_a_large_job_that_is_possible_is_answered(served: Served) -> None:
    job = {**JOB, "cluster": "dgx-h100:100000", "global_batch": 3_200_000, "pp": 80}
    assert served.post("answer", job).status in (200, 422)


SCRIPT = "<script>alert(1)</script>\"'`${}"


def test_script_in_a_name_stays_text(served: Served) -> None:
    config = {"model_type": "llama", "_name_or_path": SCRIPT}
    reply = served.post("answer", {**JOB, "model": config})
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.data["verdict"]["subject"].startswith(SCRIPT.rpartition("/")[2])
    refused = served.post("answer", {**JOB, "model": SCRIPT})
    assert refused.status == 422 and refused.headers["content-type"].startswith("application/json")


@pytest.mark.quick(13)
@pytest.mark.parametrize(
    "what", ["answer", "analyze", "advice", "timeline", "published", "compare", "export", "import", "trace", "plan"]
)
@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'{"model": 1}', b'{"model": {"model_type": []}}', b"\xff\xfe"])
def test_nonsense_is_one_line(served: Served, what: str, body: bytes) -> None:
    reply = served.ask("POST", f"/api/{what}", body, content_type="application/json")
    assert reply.status == 422 and reply.line


def test_a_taken_port_is_one_line(served: Served) -> None:
    from cli.running import error_line, run

    line = error_line(run("ui", "--port", str(served.port)))
    assert line == f"--port: 127.0.0.1:{served.port} is taken; name another port, or 0 for any that is free"
