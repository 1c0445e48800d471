"""A file on the page: the job, the notes and the refusals of the command line; and nothing else of the machine."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.running import error_line, run
from shardwise.api import analyze, plan
from shardwise.interop.frameworks import TARGETS
from shardwise.interop.kinds import configuration_in
from shardwise.spec.errors import SpecError
from shardwise.spec.installation import is_installed
from shardwise.ui.choices import catalogue
from shardwise.ui.given import MOST_BYTES, imported, job_of
from tables import table
from ui.dropped import CONFIG, FILES
from ui.serving import JOB, Served, serving

pytestmark = pytest.mark.skipif(not is_installed("uvicorn"), reason="the ui extra is not installed")
SECRET = "llama-of-nobody"
PAGE = Path(__file__).resolve().parents[2] / "src/shardwise/ui/static/index.html"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server beside files that a text may name, with a secret in its environment."""
    folder = tmp_path_factory.mktemp("started-here")
    (folder / "secret.json").write_text(json.dumps({**CONFIG, "_name_or_path": SECRET}))
    (folder / "secret.sh").write_text(f"export LAYERS=7 SECRET={SECRET}\n")
    (folder / "secret.yaml").write_text(f"name: {SECRET}\ndevice: h100-sxm\nlevels: []\n")
    os.environ["SHARDWISE_TEST_SECRET"] = SECRET
    try:
        with serving(folder) as one:
            yield one
    finally:
        del os.environ["SHARDWISE_TEST_SECRET"]
    assert len(list(folder.iterdir())) == 3, "it wrote a file"


# -- what is read ------------------------------------------------------------------------------------------------


@pytest.mark.quick(4)
@pytest.mark.parametrize("file", FILES)
def test_a_file_is_priced_as_on_the_command_line(served: Served, tmp_path: Path, file: str) -> None:
    """The same step and notes; the link and the command that the page then shows give that step too."""
    kind, text, flags = FILES[file]
    (tmp_path / file).write_text(text)
    beside = flags if kind == "job" else {"--cluster": JOB["cluster"], **flags}
    words = [word for flag in beside.items() for word in flag] if kind != "job" else []
    printed = run("analyze", str(tmp_path / file), *words, "--json")
    assert printed.status in (0, 1), printed.err
    wanted = json.loads(printed.out)["time"]["predicted_seconds"]
    found = served.post("import", {"text": text, "name": file, "job": JOB}).data
    assert found["kind"] == kind and found["name"] == file
    notes = [line.removeprefix("note: ") for line in printed.err.splitlines()]
    assert found["notes"] == [*notes, *(["run is not used: this page runs nothing"] if file == "job.yaml" else [])]
    assert found["job"]["cluster"] == beside["--cluster"]
    assert found["of_page"] == ([] if kind == "job" else ["model", "cluster"] if "--model" in flags else ["cluster"])
    shown = served.post("answer", found["job"]).data
    assert shown["verdict"]["predicted_seconds"] == wanted
    (tmp_path / "job.yaml").write_text(shown["yaml"])
    again = shlex.split(shown["command"].replace("job.yaml", str(tmp_path / "job.yaml")))
    printed = run(*again[1:], "--json")
    assert json.loads(printed.out)["time"]["predicted_seconds"] == wanted


def kind_of(text: str, name: str = "") -> str:
    found = configuration_in(text, name)
    return found if isinstance(found, str) else found.framework


def test_a_text_without_a_name_is_known_by_its_content() -> None:
    for kind, text, _ in FILES.values():
        assert kind_of(text) == kind_of(f"\n{text}" if text[0] not in "#" else text) == kind
    assert kind_of(json.dumps(CONFIG)) == "config.json"
    assert kind_of(FILES["pretrain.sh"][1], "launch.slurm") == kind_of("python pretrain_t5.py\n") == "megatron"
    assert kind_of(FILES["ds_config.json"][1], "ds_config.txt") == "deepspeed", "an ending of any text says nothing"
    assert {kind for kind, _, _ in FILES.values()} == {*TARGETS, "job"}, "one file of every kind"


def test_the_page_says_what_it_takes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    taken = page[page.index('class="hint taken"') : page.index("</ul>", page.index('class="hint taken"'))]
    assert all(one.title in taken for one in TARGETS.values()), "and every framework has a file above"
    chosen = page[page.index('accept="') :].partition('"')[2].partition('"')[0].split(",")
    assert {Path(file).suffix for file in FILES} <= set(chosen)


def test_a_config_is_the_model_and_the_rest_stays(served: Served) -> None:
    after = served.post("import", {"text": FILES["train.toml"][1], "name": "train.toml", "job": JOB}).data["job"]
    found = served.post("import", {"text": json.dumps(CONFIG), "name": "config.json", "job": after}).data
    assert found["kind"] == "config.json" and found["job"] == {**after, "model": CONFIG}
    assert served.post("answer", found["job"]).data["command"].startswith("shardwise analyze --model config.json ")
    # and the other way round: a file without a model takes the one that was read before
    deepspeed = {"text": FILES["ds_config.json"][1], "job": {**JOB, "model": CONFIG}}
    assert served.post("import", deepspeed).data["job"]["model"] == CONFIG


def test_a_part_of_a_node_and_an_own_cluster_are_kept() -> None:
    text = FILES["accelerate.yaml"][1].replace("num_processes: 16", "num_processes: 4")
    found = imported({"text": text, "job": JOB})["job"]
    assert (found["cluster"], found["gpus"]) == ("dgx-h100", 4)
    own = job_of(JOB)[0].cluster.to_dict() | {"name": "own"}
    found = imported({"text": FILES["train.toml"][1], "job": {"cluster": own}})["job"]
    assert job_of(found)[0].cluster.name == "own" and job_of(found)[0].cluster.devices == 64


def test_the_best_layout_of_a_job_that_was_read_is_searched() -> None:
    """As the page asks: without the keywords that a search varies; then with those of its answer."""
    job = imported({"text": FILES["options.args"][1], "job": {"cluster": "workstation-4090"}})["job"]
    asked = {name: value for name, value in job.items() if name not in catalogue()["varied"]}
    assert asked.keys() < job.keys() and "model" in asked
    found = plan(**asked, tp=1, cp=1, pp=1, zero=1, recompute="none", any_priced=True).to_dict()["candidates"][0]
    used, _ = job_of({**asked, **found["strategy"]})
    assert analyze(used).to_dict()["time"]["predicted_seconds"] == found["predicted_seconds"]


# -- what is refused ---------------------------------------------------------------------------------------------


@table(
    ("file", "text"),
    [
        ("train.toml", "[parallelism]\ntensor_paralel_degree = 2\n"),
        ("train.toml", "[model\n"),
        ("ds_config.json", '{"train_batch_size": 1000, "zero_optimization": {"stage": 4}}'),
        ("ds_config.json", '{"train_batch_size": '),
        ("pretrain.sh", "python pretrain_gpt.py --num-layers $1 --micro-batch-size 1"),
        ("pretrain.sh", "torchrun pretrain_bert.py --num-layers 2"),
        ("pretrain.sh", "echo hello"),
        ("job.yaml", "model: llama3-8b\ncluster: dgx-h100\nstrategy: {tpp: 2}\n"),
        ("job.yaml", "model: llama3-8b\ncluster: dgx-h100\nstrategy: {tp: 3}\n"),
        ("job.yaml", "model: llama3-8b\ncluster: dgx-h100\nrun: {stepz: 2}\n"),
        ("job.yaml", "a: [\n"),
        ("package.json", '{"name": "x", "version": "1.0"}'),
        ("notes.txt", "buy milk"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_as_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(text)
    flags = {"job.yaml": (), "package.json": ("--cluster", "dgx-h100", "--model", "gpt2")}
    line = error_line(run("analyze", file, *flags.get(file, ("--cluster", JOB["cluster"]))))
    with pytest.raises(SpecError) as error:
        imported({"text": text, "name": file, "job": JOB})
    assert str(error.value) == line


def test_options_of_a_framework_keep_their_name_in_the_line(served: Served) -> None:
    asked = {"text": "--num-layers 8 --micro-batch-size 1", "name": "options.args", "job": JOB}
    assert served.post("import", asked).line.startswith("options.args: --hidden-size: ")


HOSTILE: dict[str, tuple[str, str]] = {
    "source": ("a.sh", ". secret.sh\nsource secret.sh\npython pretrain_gpt.py --num-layers $LAYERS --hidden-size 512"),
    "cat": ("a.sh", "python pretrain_gpt.py --num-layers $(cat secret.sh) --hidden-size `cat secret.sh`"),
    "environment": ("a.sh", "python pretrain_gpt.py --num-layers ${SHARDWISE_TEST_SECRET} --hidden-size $HOME"),
    "read": ("a.sh", "read X < secret.sh; python pretrain_gpt.py --num-layers $X --micro-batch-size 1"),
    "yaml-cfg": ("a.sh", "python pretrain_gpt.py --yaml-cfg secret.yaml --micro-batch-size 1"),
    "job model": ("job.yaml", "model: secret.json\ncluster: dgx-h100\n"),
    "job folder": ("job.yaml", "model: ./\ncluster: dgx-h100\n"),
    "job cluster": ("job.yaml", "model: llama3-8b\ncluster: secret.yaml\n"),
    "job stack": ("job.yaml", "model: llama3-8b\ncluster: dgx-h100\nstack: /etc/passwd\n"),
    "job wiring": ("job.yaml", "model: llama3-8b\ncluster: {device: h100-sxm, wiring: /etc/passwd, levels: []}\n"),
    "yaml tag": ("job.yaml", "model: !!python/object/apply:os.system [id]\n"),
    "yaml aliases": ("job.yaml", "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefg", "bcdefgh"))),
    "torchtitan model": ("a.toml", "[model]\nname = './secret.json'\nflavor = '../../etc/passwd'\n[training]\n"),
    "torchtitan hub": ("a.toml", "[model]\nname = 'llama3'\nhf_assets_path = './'\nflavor = 'secret.json'\n"),
    "deep toml": ("a.toml", "x" + ".x" * 200_000 + " = 1\n"),
    "deep json": ("a.json", '{"a":' * 20_000),
    "open comments": ("a.json", '{"train_batch_size": ' + "/*" * 200_000),
    "open quotes": ("a.json", '{"train_batch_size": ' + '"\\' * 200_000),
    "doubling": ("a.sh", "A=xxxxxxxxxx\n" + 'A="$A$A"\n' * 200 + "python pretrain_gpt.py --num-layers $A"),
    "endless script": ("a.sh", "python pretrain_gpt.py --num-layers 2\n" + "A=1\n" * 100_000),
    "half a character": ("a.json", '{"model_type": "llama", "_name_or_path": "\\ud800"}'),
    "no number": ("config.json", '{"model_type": "llama", "rope_theta": NaN}'),
    "zero byte": ("a\0.sh", "--num-layers 2"),
    "long name": ("a" * 1000, "--num-layers 2"),
    "nothing": ("a.sh", " \n"),
}  # fmt: skip


READ = ("yaml-cfg", "torchtitan model", "torchtitan hub")  # but not what it names


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_one_line_and_reads_nothing(served: Served, what: str) -> None:
    name, text = HOSTILE[what]
    since = time.monotonic()
    reply = served.post("import", {"text": text, "name": name, "job": {**JOB, "model": "llama3-8b"}})
    assert time.monotonic() - since < 30, "it ends"
    said = reply.body.decode()
    assert SECRET not in said and "root:" not in said and "/root" not in said
    if what in READ:
        assert reply.data["job"]["model"] == "llama3-8b", "the one of the page"
        assert any("secret" in note or "passwd" in note for note in reply.data["notes"])
    else:
        assert reply.status == 422 and len(reply.line) < 600, said[:300]


def test_no_file_of_the_machine_is_opened_for_a_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever it says: files and folders of the names that these texts have are there to be found."""
    monkeypatch.chdir(tmp_path)
    for name in ("secret.json", "secret.sh", "secret.yaml", *FILES):
        Path(name).write_text(SECRET)
    asked: list[str] = []
    before = Path.open

    def noted(path: Path, *arguments: Any, **keywords: Any) -> Any:
        asked.append(str(path))
        return before(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", noted)
    texts = [(name, text) for name, (_, text, _) in FILES.items()] + [
        one for one in HOSTILE.values() if len(one[1]) < 1000
    ]
    for name, text in texts:
        try:
            imported({"text": text, "name": name, "job": JOB})
        except SpecError as error:
            assert SECRET not in str(error)
    assert [one for one in asked if "site-packages" not in one and "shardwise" not in one] == []


def test_who_may_not_ask_imports_nothing(served: Served) -> None:
    asked = {"text": FILES["train.toml"][1], "job": JOB}
    assert served.post("import", asked, origin="http://evil.example").status == 403
    assert served.post("import", asked, host="evil.example").status == 421
    body = json.dumps(asked).encode()
    assert served.ask("POST", "/api/import", body, content_type="text/plain").status == 415
    assert served.ask("GET", "/api/import").status in (404, 405)
    large = {"text": "#" * 10_000_000}
    with contextlib.suppress(OSError):  # it may close the connection before all was sent
        assert served.post("import", large).status == 413
    assert MOST_BYTES < 10_000_000 and served.post("import", asked).status == 200
    assert served.post("import", {**asked, "path": "secret.json"}).line.startswith("path: is not a field")


def test_script_in_the_names_of_a_file_stays_text(served: Served) -> None:
    script = "<script>alert(1)</script>"
    text = f"model: {{name: '{script}', layers: 2, hidden: 64, heads: 2, vocab: 100, ffn: 128}}\ncluster: dgx-h100\n"
    reply = served.post("import", {"text": text, "name": f"../{script}.yaml", "job": JOB})
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.data["name"] == "script>.yaml" and reply.data["job"]["model"]["name"] == script
