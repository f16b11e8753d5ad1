"""A few models of torchvision, timm and transformers, as they are, against the loop; `benchmarks.zoo` runs them all."""

from __future__ import annotations

import pytest

from benchmarks.zoo import from_timm, from_torchvision, from_transformers
from benchmarks.zoo.check import check

SOURCES = {"torchvision": from_torchvision, "timm": from_timm, "transformers": from_transformers}
FAST = {
    "torchvision": ["squeezenet1_1", "mobilenet_v3_small"],
    "timm": ["test_vit", "test_vit_relpos", "test_nfnet"],
    "transformers": [
        "bert", "albert", "funnel", "gpt2", "llama-cached", "mamba", "t5", "bart", "vit", "swin", "wav2vec2", "mixtral",
    ],
}  # fmt: skip
MEMBERS = [(source, name) for source, names in FAST.items() for name in names]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("source", "name"), MEMBERS, ids=["/".join(m) for m in MEMBERS])
def test_member(source, name):
    pytest.importorskip(source)
    (member,) = (m for m in SOURCES[source].members() if m.name == name)
    record = check(member)
    assert record["verdict"] == "exact", record
