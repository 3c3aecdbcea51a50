"""Loading names what is wrong with a model's files; dummy weights need none."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.core.errors import ModelFilesError
from pdserve.engine.weights import DummyWeights, SafetensorsWeights
from tests.engine.families import FAMILIES, save_model
from tests.engine.runs import logprobs_after, make_runner

CPU = torch.device("cpu")
NAME = "model.layers.1.mlp.down_proj.weight"
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_model("llama_tied", tmp_path)


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_sharded_checkpoint_is_the_same_model(directory: Path, tmp_path: Path) -> None:
    shards = save_model("llama_tied", tmp_path / "shards", max_shard_size="60KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert torch.equal(
        logprobs_after(make_runner(shards), PROMPT), logprobs_after(make_runner(directory), PROMPT)
    )


def test_a_missing_tensor_is_named(directory: Path) -> None:
    change(directory, lambda tensors: tensors.pop(NAME))
    with pytest.raises(ModelFilesError, match=f"{directory}: tensor {NAME} is missing"):
        make_runner(directory)


def test_an_unexpected_tensor_is_named(directory: Path) -> None:
    change(directory, lambda tensors: tensors.update(extra=torch.ones(1)))
    with pytest.raises(ModelFilesError, match="1 unexpected tensors: extra"):
        make_runner(directory)


def test_a_misshaped_tensor_is_named_with_both_shapes(directory: Path) -> None:
    change(directory, lambda tensors: tensors.update({NAME: torch.ones(64, 95)}))
    with pytest.raises(ModelFilesError, match=rf"{NAME} has shape \(64, 95\), expected \(64, 96\)"):
        make_runner(directory)


def test_what_old_or_careless_checkpoints_carry_is_ignored(directory: Path) -> None:
    expected = logprobs_after(make_runner(directory), PROMPT)
    extra = {
        "lm_head.weight": torch.zeros(199, 64),  # tied: the embedding counts
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    change(directory, lambda tensors: tensors.update(extra))
    assert torch.equal(logprobs_after(make_runner(directory), PROMPT), expected)


def test_an_untied_model_needs_its_head(directory: Path) -> None:
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    with pytest.raises(ModelFilesError, match=r"lm_head\.weight is missing"):
        make_runner(directory)


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"not safetensors at all, just text"])
def test_a_damaged_file_is_named(directory: Path, content: bytes) -> None:
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFilesError, match=r"model\.safetensors: not a whole safetensors"):
        make_runner(directory)


def test_a_cut_file_is_named(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelFilesError, match=r"model\.safetensors: not a whole safetensors"):
        make_runner(directory)


def test_no_weights_at_all_are_named(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match=r"neither model\.safetensors nor"):
        make_runner(directory)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ("{", "not an index"),
        ("{}", "not an index"),
        (
            '{"weight_map": {"model.norm.weight": "gone.safetensors"}}',
            r"gone\.safetensors: no such",
        ),
        ('{"weight_map": {"nothing": "model.safetensors"}}', "q_proj.weight is missing"),
    ],
)
def test_a_bad_index_is_named(directory: Path, index: str, named: str) -> None:
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFilesError, match=named):
        make_runner(directory)


def test_only_the_asked_part_is_read(directory: Path) -> None:
    weights = SafetensorsWeights(directory, dtype=torch.bfloat16, device=CPU)
    whole = load_file(directory / "model.safetensors")[NAME].bfloat16()
    rows = weights.take(NAME, (64, 96), rows=range(16, 32))
    columns = weights.take(NAME, (64, 96), columns=range(90, 96))
    assert torch.equal(rows, whole[16:32])
    assert torch.equal(columns, whole[:, 90:96])


def test_dummy_weights_depend_on_seed_and_name_only() -> None:
    weights = DummyWeights(seed=1, dtype=torch.float32, device=CPU)
    whole = weights.take("a", (6, 8))
    assert torch.equal(weights.take("a", (6, 8), rows=range(2, 4)), whole[2:4])
    assert torch.equal(weights.take("a", (6, 8), columns=range(3)), whole[:, :3])
    assert not torch.equal(weights.take("b", (6, 8)), whole)
    assert not torch.equal(
        DummyWeights(seed=2, dtype=torch.float32, device=CPU).take("a", (6, 8)), whole
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_need_only_a_config_and_give_sane_logits(
    family: str, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(model_of(family) / "config.json", tmp_path)
    logprobs = logprobs_after(make_runner(tmp_path, load_format="dummy"), PROMPT)
    assert logprobs.isfinite().all()
    assert 0.3 < logprobs.std() < 3
