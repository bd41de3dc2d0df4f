"""PD-06: workers that do not fit refuse each other in words, and nobody's KV comes from such a pair."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.sampling import SamplingParams
from tests.cases.case_data import token_array
from tests.cases.system import CONTROL, System, joined
from tests.e2e.asking import submit
from tests.e2e.cluster import Cluster, eventually
from tests.factories.served_model import write_served_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MISFIT = "prefill-1"


def other_model(folder: Path, tiny_model: Path, changes: Sequence[str]) -> Path:
    """A copy of the tiny model that differs in these things."""
    if "layers" in changes:
        write_served_model(folder, num_layers=5)
        return folder
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    if "one tensor" in changes:
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        name = sorted(name for name in tensors if name.endswith("mlp.down_proj.weight"))[-1]
        tensors[name] = tensors[name] + torch.tensor(0.01)
        save_file(tensors, file, metadata={"format": "pt"})
    if "rope" in changes:
        edit_json(folder / "config.json", lambda config: config["rope_parameters"].update(rope_theta=5000.0))
    if "chat template" in changes:
        template = {"chat_template": "{{ messages[0]['content'] }}"}
        edit_json(folder / "tokenizer_config.json", lambda config: config.update(template))
    return folder


def edit_json(file: Path, edit: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    edit(content)
    file.write_text(json.dumps(content), encoding="utf-8")


@dataclass(frozen=True)
class Misfit:
    #: Of the worker, and what is different in its model.
    options: Mapping[str, str]
    changes: Sequence[str]
    #: Fields that the refusal names, all of them.
    fields: Sequence[str]


#: That each field alone is enough is judged where manifests are compared (`tests/common/test_manifest.py`).
MISFITS = {
    "kv dtype fp16": Misfit({"dtype": "float16", "block_size": "32"}, (), ("kv_dtype",)),
    "kv dtype bf16 and number of layers": Misfit({"dtype": "bfloat16"}, ("layers",), ("kv_dtype", "num_layers")),
    "rope and context": Misfit({"max_model_len": "1024"}, ("rope",), ("weights_fingerprint", "max_model_len")),
    "one tensor and chat template": Misfit(
        {}, ("one tensor", "chat template"), ("weights_fingerprint", "tokenizer_fingerprint")
    ),
}


@pytest.mark.parametrize("difference", MISFITS)
def test_pd_06_a_pair_that_does_not_fit_is_refused(
    system: System, tiny_model: Path, tmp_path: Path, difference: str
) -> None:
    misfit, cluster = MISFITS[difference], system.cluster
    model = other_model(tmp_path, tiny_model, misfit.changes) if misfit.changes else tiny_model
    with joined(system, MISFIT, model=str(model), **misfit.options) as member:
        manifests = [cluster.manifest(name) for name in (MISFIT, "decode-0")]
        for name, peer in (("decode-0", member.address), (MISFIT, "decode-0")):
            reason = eventually(lambda name=name, peer=peer: refusal(cluster, name, peer), what=f"a refusal by {name}")
            for field in misfit.fields:
                there, here = (getattr(manifest, field) for manifest in manifests)
                assert there != here
                assert field in reason and str(there) in reason and str(here) in reason
        assert MISFIT not in cluster.status("decode-0").paired
        # Those that fit go on, and nothing is asked of the other one.
        for _ in range(3):
            assert system.send(CONTROL).text == system.control_text
        assert cluster.status(MISFIT).accepted_total == 0
        assert member.alive


def refusal(cluster: Cluster, worker: str, peer: str) -> str:
    return next((reason for reason in cluster.status(worker).refused if reason.startswith(peer)), "")


def test_pd_06_block_sizes_may_differ(system: System) -> None:
    """The wire form knows no blocks: such a pair is used, and right."""
    cluster = system.cluster
    with joined(system, "prefill-1", block_size="32"):
        eventually(lambda: "prefill-1" in cluster.status("decode-0").paired, what="the pair")
        prompt, params = token_array(100, seed=6), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        decode, prefill = (cluster.members[name].address for name in ("decode-0", "prefill-1"))
        apart = submit(decode, prompt, params, prefill=[prefill], salt="apart")
        assert apart.was_transferred
        assert apart.token_ids == submit(decode, prompt, params, salt="here").token_ids
