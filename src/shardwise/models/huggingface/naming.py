"""What a Hugging Face family calls the tensors of one model, wherever they are stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.interop import model_from_hf_config
from shardwise.interop.companions import config_for
from shardwise.models.huggingface.layouts import LAYOUTS, Layout
from shardwise.models.huggingface.places import Place, places_of
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.model import Model

_OTHER_CONFIG = "use the config.json that belongs to these weights"


@dataclass(frozen=True)
class Naming:
    """``model`` is without the modules for multi-token prediction; ``config`` is the content of its config.json."""

    model: Model
    layout: Layout
    config: Mapping[str, Any]

    @classmethod
    def of_config(cls, config: Mapping[str, Any], model: Model | None = None) -> Naming:
        """Of a config.json; raises SpecError for a family whose weights are not read."""
        described = model or model_from_hf_config(config)
        return cls(replace(described, mtp_layers=0), _layout_of(config), config)

    @classmethod
    def of_model(cls, model: Model, source: Path | None = None) -> Naming:
        """Names of the first family that can express the model, or of the folder it came from (``source``)."""
        config = config_for(replace(model, mtp_layers=0), source)
        if config["model_type"] not in LAYOUTS:
            problem = f"weights of the family {config['model_type']} are not written"
            raise SpecError("model", problem, f"written are {', '.join(LAYOUTS)}")
        return cls.of_config(config, model)

    @cached_property
    def places(self) -> dict[str, Place]:
        return places_of(self.model, self.layout, interleaved=self.config.get("rope_interleave") is not False)

    def stored_name(self, theirs: str, present: Collection[str]) -> str:
        """The published GPT-2 leaves out the prefix that the library writes."""
        bare = theirs.removeprefix(self.layout.prefix)
        return bare if theirs not in present and bare in present else theirs

    def check(self, present: Collection[str], where: str) -> None:
        """Raises SpecError for the first tensor that is missing or that no decoder of this model has."""
        needed = {self.stored_name(one, present): one for place in self.places.values() for one in place.names}
        for stored, theirs in needed.items():
            if stored not in present:
                raise SpecError(theirs, f"is missing in {where}", f"complete the download, or {_OTHER_CONFIG}")
        for stored in sorted(set(present) - needed.keys()):
            if "weight_scale" in stored:
                raise SpecError(stored, "is the scale of quantised weights", "convert the checkpoint to bf16 first")
            if not self._may_be_left(stored):
                problem = f"in {where} belongs to no part of {self.model.name} as config.json describes it"
                raise SpecError(stored, problem, _OTHER_CONFIG)

    def _may_be_left(self, stored: str) -> bool:
        """Whether a tensor is none of ours: a constant, a tied head, or of a module for multi-token prediction."""
        if stored.endswith(self.layout.ignored):
            return True
        if stored == "lm_head.weight":
            return self.model.tied_embeddings
        before = self.layout.layer.split("{}")[0]
        index = stored.removeprefix(before).split(".")[0] if stored.startswith(before) else ""
        return (
            index.isdigit() and int(index) >= self.model.layers and bool(self.config.get("num_nextn_predict_layers", 0))
        )


def _layout_of(config: Mapping[str, Any]) -> Layout:
    nested = config.get("text_config")
    model_type = config.get("model_type")
    if model_type in LAYOUTS:
        return LAYOUTS[model_type]
    what = "a part of a larger model" if isinstance(nested, dict) else shown(model_type)
    raise SpecError("model_type", f"the weights of {what} are not read", f"use one of {', '.join(LAYOUTS)}")
