"""Models of a hub, fetched with its own library from a server that speaks its protocol."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from pdserve.core.errors import ModelFilesError, ModelNotFoundError
from pdserve.models.hub import HuggingFaceHub
from pdserve.models.hub_cache import HubCache, is_whole, whole_models
from pdserve.models.hub_repo import HubFile, HubModel, HubRepo
from tests.models.fake_hub import FakeHub, serving

REPO = "someone/some-model"
MODEL = HubModel(repo_id=REPO)
SMALL = {
    "config.json": b'{"hidden_size": 8}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "generation_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
}
WHOLE = SMALL | {"model.safetensors": bytes(range(256)) * 400}
NOT_TAKEN = {
    "README.md": b"words",
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"the weights once more",
    "modeling_custom.py": b"import os",
    "original/params.json": b"{}",
    "../escape.json": b"{}",
}
SHARDS = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 5000 for i in (1, 2)}
INDEX = {
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {f"t{i}": name for i, name in enumerate(SHARDS)}}
    ).encode()
}


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub()


@pytest.fixture
def url(hub: FakeHub) -> Iterator[str]:
    with serving(hub) as url:
        yield url


@dataclass
class Fetcher:
    """Fetches into a folder of its own from the fake hub."""

    root: Path
    url: str
    token: str | None = None

    def cache(self) -> HubCache:
        api = HfApi(endpoint=self.url, token=self.token or False)
        return HubCache(self.root, lambda: HuggingFaceHub(api))

    def fetch(self, model: HubModel = MODEL, *, refresh: bool = False) -> Path:
        return self.cache().fetch(model, refresh=refresh, progress=False)

    def offline(self) -> HubCache:
        """The same folder where nobody can be asked."""

        def connect() -> HuggingFaceHub:
            raise AssertionError("the hub was asked")

        return HubCache(self.root, connect)


@pytest.fixture
def fetcher(tmp_path: Path, url: str) -> Fetcher:
    return Fetcher(root=tmp_path, url=url)


def content_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".complete"
    }


# ---- what comes -----------------------------------------------------------------------------


def test_weights_configuration_and_tokenizer_come_and_nothing_else(
    hub: FakeHub, fetcher: Fetcher
) -> None:
    commit = hub.publish(REPO, WHOLE | NOT_TAKEN)
    directory = fetcher.fetch()
    assert directory == fetcher.root / "models" / "hub" / "someone--some-model" / commit
    assert content_of(directory) == WHOLE
    assert is_whole(directory)
    assert whole_models(fetcher.root) == [directory]
    assert sorted(hub.downloads()) == sorted(WHOLE)


def test_of_several_files_of_weights_those_come_that_the_index_names(
    hub: FakeHub, fetcher: Fetcher
) -> None:
    files = SMALL | INDEX | SHARDS
    hub.publish(REPO, files | NOT_TAKEN | {"model-00009-of-00009.safetensors": b"older"})
    assert content_of(fetcher.fetch()) == files


def test_a_model_that_is_there_needs_no_hub(hub: FakeHub, fetcher: Fetcher) -> None:
    commit = hub.publish(REPO, WHOLE)
    directory = fetcher.fetch()
    for revision in ("main", commit):
        model = HubModel(repo_id=REPO, revision=revision)
        assert fetcher.offline().fetch(model, refresh=False, progress=False) == directory


def test_a_branch_is_followed_when_it_is_fetched_anew_alone(hub: FakeHub, fetcher: Fetcher) -> None:
    first = hub.publish(REPO, WHOLE)
    fetcher.fetch()
    second = hub.publish(REPO, WHOLE | {"config.json": b'{"hidden_size": 9}'})
    assert fetcher.fetch().name == first
    assert fetcher.fetch(refresh=True).name == second
    assert fetcher.fetch().name == second
    assert fetcher.fetch(HubModel(repo_id=REPO, revision=first)).name == first


def test_a_branch_a_tag_or_a_commit_can_be_named(hub: FakeHub, fetcher: Fetcher) -> None:
    main = hub.publish(REPO, WHOLE)
    other = hub.publish(REPO, WHOLE | {"config.json": b'{"v": 2}'}, branch="refs/pr/1")
    for revision, commit in (("refs/pr/1", other), ("main", main), (other, other)):
        model = HubModel(repo_id=REPO, revision=revision)
        assert fetcher.fetch(model).name == commit


def test_a_token_opens_what_is_private_and_is_in_no_message(hub: FakeHub, fetcher: Fetcher) -> None:
    hub.publish(REPO, WHOLE)
    hub.token = "hf_right"
    fetcher.token = "hf_wrong"
    with pytest.raises(ModelNotFoundError, match="private and needs a token in HF_TOKEN") as error:
        fetcher.fetch()
    assert "hf_wrong" not in str(error.value)
    fetcher.token = "hf_right"
    assert is_whole(fetcher.fetch())


# ---- what is interrupted --------------------------------------------------------------------


def test_a_download_that_breaks_off_is_not_whole_and_is_gone_on_with(
    hub: FakeHub, fetcher: Fetcher
) -> None:
    hub.publish(REPO, SMALL | INDEX | SHARDS)
    one, two = SHARDS
    hub.break_after = {two: 1000}
    with pytest.raises(ModelFilesError):
        fetcher.fetch()
    assert whole_models(fetcher.root) == []
    hub.break_after = {}
    hub.asked.clear()
    assert content_of(fetcher.fetch()) == SMALL | INDEX | SHARDS
    assert hub.downloads() == [two]
    assert one not in hub.downloads()
    assert list(fetcher.root.rglob("*.part")) == []


@pytest.mark.parametrize("damage", ["removed", "cut short"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_model_that_lost_part_of_a_file_is_fetched_again(
    hub: FakeHub, fetcher: Fetcher, name: str, damage: str
) -> None:
    hub.publish(REPO, WHOLE)
    file = fetcher.fetch() / name
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert not is_whole(file.parent)
    assert content_of(fetcher.fetch()) == WHOLE


def test_other_bytes_than_the_hub_says_are_refused_by_file_and_hash_and_removed(
    hub: FakeHub, fetcher: Fetcher
) -> None:
    hub.publish(REPO, WHOLE)
    hub.damaged = {"model.safetensors"}
    with pytest.raises(ModelFilesError, match=r"model\.safetensors: sha256 is \w+, expected \w+"):
        fetcher.fetch()
    assert whole_models(fetcher.root) == []
    hub.damaged = set()
    assert content_of(fetcher.fetch()) == WHOLE


# ---- what is wrong --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (SMALL | {"pytorch_model.bin": b""}, r"no safetensors .*; it has .*pytorch_model\.bin"),
        (SMALL | {"model.gguf": b""}, "no safetensors"),
        ({"model.safetensors": b""}, r"no config\.json; it has model\.safetensors"),
        ({"config.json": b"{}", "model.safetensors": b""}, r"no tokenizer\.json"),
        ({}, r"no config\.json; it is empty"),
        (SMALL | INDEX, r"no model-00001-of-00002\.safetensors, but .*index\.json names it"),
        (SMALL | {"model.safetensors.index.json": b"[]"}, "not an index"),
        (
            SMALL | {"model.safetensors.index.json": b'{"weight_map": {"t": "../../x"}}'},
            "no name of a safetensors file beside it",
        ),
        (
            SMALL
            | {"model.safetensors.index.json": b'{"weight_map": {"t": "model.bin"}}'}
            | {"model.bin": b"a pickle"},
            "no name of a safetensors file beside it",
        ),
    ],
)
def test_a_repository_that_lacks_something_is_refused_by_what_it_lacks(
    hub: FakeHub, fetcher: Fetcher, files: dict[str, bytes], says: str
) -> None:
    hub.publish(REPO, files)
    with pytest.raises(ModelFilesError, match=says):
        fetcher.fetch()
    assert whole_models(fetcher.root) == []


def test_a_commit_that_is_none_is_refused_and_never_becomes_a_path(
    hub: FakeHub, fetcher: Fetcher
) -> None:
    hub.publish(REPO, WHOLE)
    hub.files[REPO]["../../../x"] = WHOLE
    hub.branches[REPO]["main"] = "../../../x"
    with pytest.raises(ModelFilesError, match=r"says that it is at commit '\.\./\.\./\.\./x'"):
        fetcher.fetch()
    assert not (fetcher.root.parent / "x").exists()


def test_an_unknown_model_is_refused_by_name(hub: FakeHub, fetcher: Fetcher) -> None:
    with pytest.raises(ModelNotFoundError, match=r"hf:someone/some-model@main: http.* no such mod"):
        fetcher.fetch()


def test_an_unknown_revision_is_refused_by_name(hub: FakeHub, fetcher: Fetcher) -> None:
    hub.publish(REPO, WHOLE)
    with pytest.raises(ModelNotFoundError, match=r"@v9: .* no such revision of someone/some-mod"):
        fetcher.fetch(HubModel(repo_id=REPO, revision="v9"))


def test_a_gated_model_says_where_to_ask(hub: FakeHub, fetcher: Fetcher) -> None:
    hub.publish(REPO, WHOLE)
    hub.gated = {REPO}
    with pytest.raises(ModelNotFoundError, match=rf"gated: ask .* at {fetcher.url}/{REPO}"):
        fetcher.fetch()


@pytest.mark.parametrize(("status", "says"), [(500, "answered 500"), (403, r"refused \(403\)")])
def test_an_answer_that_is_an_error_is_named(
    hub: FakeHub, fetcher: Fetcher, status: int, says: str
) -> None:
    hub.publish(REPO, WHOLE)
    hub.status = status
    with pytest.raises(ModelFilesError, match=says):
        fetcher.fetch()


def test_without_a_network_it_says_what_else_to_do(tmp_path: Path) -> None:
    fetcher = Fetcher(root=tmp_path, url="http://127.0.0.1:1")
    with pytest.raises(ModelFilesError, match=r"127\.0\.0\.1:1 cannot be reached, .*name its path"):
        fetcher.fetch()


@dataclass
class ListedHub:
    """Lists what it is told to; its disk is full."""

    files: tuple[HubFile, ...]
    brought: list[str] = field(default_factory=list)

    def look_up(self, model: HubModel) -> HubRepo:
        return HubRepo(commit="c" * 40, files=self.files)

    def download(self, model: HubModel, commit: str, name: str, folder: str) -> None:
        if name.endswith(".safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        (Path(folder) / name).write_bytes(b"{}")


@pytest.mark.parametrize(
    ("size_bytes", "says"),
    [(1 << 60, r"1,152,921,504.6 GB more, but .* GB free"), (8, "No space left on device")],
)
def test_a_disk_that_is_too_small_is_named_before_and_while_it_fills(
    tmp_path: Path, size_bytes: int, says: str
) -> None:
    files = [HubFile(name=n, size_bytes=2, sha256=None) for n in ("config.json", "tokenizer.json")]
    weights = HubFile(name="model.safetensors", size_bytes=size_bytes, sha256=None)
    cache = HubCache(tmp_path, lambda: ListedHub((*files, weights)))
    with pytest.raises(ModelFilesError, match=says):
        cache.fetch(MODEL, refresh=False, progress=False)
    assert whole_models(tmp_path) == []


# ---- by the command -------------------------------------------------------------------------


def pdserve(*words: str, root: Path, url: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pdserve.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ
        | {"PDSERVE_CACHE": str(root), "HF_ENDPOINT": url, "HF_HOME": str(root / "hf"), **env},
    )


def test_the_command_fetches_with_the_token_of_the_environment_and_lists(
    hub: FakeHub, tmp_path: Path, url: str
) -> None:
    commit = hub.publish(REPO, WHOLE)
    hub.token = "hf_right"
    refused = pdserve("models", "fetch", REPO, root=tmp_path, url=url)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith("needs a token in HF_TOKEN (none is set)")
    done = pdserve("models", "fetch", REPO, root=tmp_path, url=url, HF_TOKEN="hf_right")
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    assert directory.name == commit
    assert content_of(directory) == WHOLE
    listed = pdserve("models", "list", root=tmp_path, url=url)
    assert f"hf:{REPO}  ({commit[:12]})  {directory}" in listed.stdout


def test_the_command_serves_nothing_that_it_cannot_fetch(tmp_path: Path) -> None:
    done = pdserve(
        "serve", "--set=model.source=models/llama", root=tmp_path, url="http://127.0.0.1:1"
    )
    assert done.returncode == 2
    assert "cannot be reached" in done.stderr
    assert "nor is there a directory 'models/llama'" in done.stderr
