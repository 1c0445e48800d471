"""How many configuration files of other frameworks are recognised and priced: `python bench/recipes.py FOLDER [...]`.

On eight H100, or as many as a file names, or on the fewest that its degrees allow; where a file names a model that is
not known here, Llama 3 8B stands in, or Qwen3 30B-A3B where its experts are split.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from shardwise.cost.analysis import analyze
from shardwise.interop.frameworks import configuration_of
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model

STAND_INS = [presets.load("model", Model, name) for name in ("llama3-8b", "qwen3-30b-a3b")]
NODE = cluster_from("dgx-h100")


def main() -> int:
    for folder in map(Path, sys.argv[1:]):
        files = [
            path for path in sorted(folder.rglob("*")) if path.suffix in (".yaml", ".yml", ".json", ".toml", ".sh")
        ]
        counts = Counter(outcome(path) for path in files)
        print(
            f"{folder}: {len(files)} files; " + ", ".join(f"{number} {what}" for what, number in counts.most_common())
        )
    return 0


def outcome(path: Path) -> str:
    """The framework and what became of the file; a refusal is printed."""
    found = configuration_of(path.read_text(encoding="utf-8"), path.name, path.parent)
    if found is None:
        return "not recognised"
    kind = found.framework
    refused: SpecError | None = None
    for times in (1, 2, 4, 8, 16, 32, 64):
        for stand_in in STAND_INS:
            try:
                cluster = NODE.with_devices((found.read(stand_in).devices or NODE.devices) * times)
                known = not found.read(cluster=cluster).no_model
                model = None if known else stand_in
                analyze(found.read(model, cluster).job(cluster, model))
            except SpecError as error:
                refused = refused or error
            else:
                return f"{kind}, priced" + ("" if known else " with another model")
    print(f"  {path.name}: {refused}")
    return f"{kind}, refused"


if __name__ == "__main__":
    raise SystemExit(main())
