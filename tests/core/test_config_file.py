"""Reading the cluster file: YAML, types, unknown keys and overrides from the command line."""

import dataclasses
import typing
from pathlib import Path

import pytest

from pdserve.core.config import ClusterConfig, ResourcesConfig
from pdserve.core.config_file import load_config, parse_config
from pdserve.core.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | None, overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides or [])
    return str(error.value)


# ---- the file -------------------------------------------------------------------------------


def test_values_of_every_kind_are_read(tmp_path: Path):
    config = load_config(
        write(
            tmp_path,
            """
            model: {source: some/model, max_model_len: 4096}
            network: {port_range: [2000, 3000]}
            prefill:
              replicas: 2
              resources: {num_cpus: 2, num_gpus: 0.5}
            decode:
            """,
        )
    )
    assert config.model.source == "some/model"
    assert config.model.max_model_len == 4096
    assert config.network.port_range == (2000, 3000)
    assert config.prefill.resources == ResourcesConfig(num_cpus=2.0, num_gpus=0.5)
    assert type(config.prefill.resources.num_cpus) is float
    assert config.decode == ClusterConfig().decode


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n"])
def test_a_file_without_content_is_all_defaults(tmp_path: Path, text: str):
    assert load_config(write(tmp_path, text)) == ClusterConfig()


@pytest.mark.parametrize(
    "text",
    [
        "model: [",
        "model:\n\tsource: x",
        "a: b: c",
        "model: {source: 2001-99-99}",
        "model: !!python/object:os.system {}",
        "model: {source: a}\nmodel: {source: b}",
        "decode:\n  replicas: 2\n  max_num_seqs: 4\n  replicas: 3",
    ],
)
def test_what_is_not_yaml_names_the_file(tmp_path: Path, text: str):
    path = write(tmp_path, text)
    assert refusal(path).startswith(f"{path}: not valid YAML: ")


def test_a_key_that_is_given_twice_is_named_with_its_line(tmp_path: Path):
    message = refusal(write(tmp_path, "decode:\n  replicas: 2\n  replicas: 3\n"))
    assert "key 'replicas' is given twice" in message
    assert "line 2" in message


def test_anchors_and_merged_keys_are_yaml_too(tmp_path: Path):
    text = """
    prefill: &pool {replicas: 2, max_num_seqs: 8}
    decode: {<<: *pool, replicas: 3}
    """
    config = load_config(write(tmp_path, text))
    assert (config.prefill.replicas, config.decode.replicas) == (2, 3)
    assert config.decode.max_num_seqs == 8


def test_bytes_that_are_not_utf_8_name_the_file(tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"model: \xff\xfe")
    assert refusal(path).startswith(f"{path}: not valid YAML: ")


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "3\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str):
    assert "expected a mapping of sections, got " in refusal(write(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    path = tmp_path / "absent.yaml"
    assert refusal(path) == f"{path}: cannot be read: No such file or directory"
    assert refusal(tmp_path).startswith(f"{tmp_path}: cannot be read: ")


# ---- keys and types -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prefil": {}}, "prefil: unknown key; did you mean prefill?"),
        (
            {"decode": {"max_num_seq": 4}},
            "decode.max_num_seq: unknown key; did you mean decode.max_num_seqs?",
        ),
        (
            {"decode": {"resources": {"gpus": 1}}},
            "decode.resources.gpus: unknown key; did you mean decode.resources.num_gpus?",
        ),
        (
            {"router": {"classes": [{"name": "a", "blow": 3}]}},
            "router.classes[0].blow: unknown key; did you mean router.classes[0].below?",
        ),
        ({"ray": {"xyz": 1}}, "ray.xyz: unknown key; known are ray.address"),
        ({1: {}}, "1: unknown key; known are model, ray, network"),
        ({"router": {"classes": [{}]}}, "router.classes[0].name: required, but not given"),
    ],
)
def test_an_unknown_or_missing_key_names_the_nearest_one(data: dict[str, object], message: str):
    with pytest.raises(ConfigError) as error:
        parse_config(data)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("section", "key", "value", "problem"),
    [
        ("decode", "replicas", "2", "expected a whole number, got '2' (str)"),
        ("decode", "replicas", 2.0, "expected a whole number, got 2.0 (float)"),
        ("decode", "replicas", True, "expected a whole number, got True (bool)"),
        ("decode", "replicas", None, "expected a whole number, got None (NoneType)"),
        ("decode", "overtake_s", "fast", "expected a number, got 'fast' (str)"),
        ("decode", "overtake_s", True, "expected a number, got True (bool)"),
        ("decode", "overtake_s", float("nan"), "expected a number, got nan (float)"),
        ("decode", "overtake_s", float("inf"), "expected a number, got inf (float)"),
        ("decode", "overtake_s", 10**400, "expected a number, got one beyond 2**53"),
        ("decode", "headroom_tokens", 1 << 53, "expected a whole number, got one beyond 2**53"),
        ("decode", "replicas", -(10**30), "expected a whole number, got one beyond 2**53"),
        ("model", "source", 7, "expected a string, got 7 (int)"),
        ("model", "max_model_len", "long", "expected a whole number, got 'long' (str)"),
        ("network", "port_range", 2000, "expected a list, got 2000 (int)"),
        ("network", "port_range", [1, 2, 3], "expected 2 values, got 3"),
        ("router", "classes", {"name": "a"}, "expected a list, got {'name': 'a'} (dict)"),
        ("router", "limits", [], "expected a mapping, got [] (list)"),
    ],
)
def test_a_value_of_another_type_names_its_key_and_what_is_expected(
    section: str, key: str, value: object, problem: str
):
    with pytest.raises(ConfigError) as error:
        parse_config({section: {key: value}})
    assert str(error.value).startswith(f"{section}.{key}: {problem}")


def every_key(cls: type = ClusterConfig, *path: str) -> list[tuple[str, ...]]:
    hints = typing.get_type_hints(cls)
    keys: list[tuple[str, ...]] = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        keys.append((*path, field.name))
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            keys += every_key(hint, *path, field.name)
    return keys


@pytest.mark.parametrize("path", every_key(), ids=".".join)
def test_no_key_takes_anything_or_fails_without_its_name(path: tuple[str, ...]):
    value: object = {1, 2}  # a set: nothing that YAML could say
    for key in reversed(path):
        value = {key: value}
    with pytest.raises(ConfigError) as error:
        parse_config(typing.cast(dict[str, object], value))
    assert str(error.value).startswith(f"{'.'.join(path)}: expected ")


# ---- overrides ------------------------------------------------------------------------------


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path):
    path = write(tmp_path, "decode: {replicas: 2, max_num_seqs: 9}")
    config = load_config(path, ["decode.replicas=3", "decode.replicas=4", "model.dtype=bfloat16"])
    assert (config.decode.replicas, config.decode.max_num_seqs) == (4, 9)
    assert config.model.dtype == "bfloat16"


def test_overrides_need_no_file_and_reach_every_depth():
    config = load_config(None, ["router.limits.max_n=4", "prefill.resources.num_gpus=1"])
    assert config.router.limits.max_n == 4
    assert config.prefill.resources.num_gpus == 1.0


def test_values_of_overrides_are_yaml():
    config = load_config(
        None, ["network.port_range=[2000, 2100]", "model.served_name=a=b", "prefill={replicas: 0}"]
    )
    assert config.network.port_range == (2000, 2100)
    assert config.model.served_name == "a=b"
    assert config.prefill.replicas == 0


def test_an_override_reaches_into_a_section_that_the_file_leaves_empty(tmp_path: Path):
    assert load_config(write(tmp_path, "decode:\n"), ["decode.replicas=3"]).decode.replicas == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decode.replicas", "--set 'decode.replicas': expected key.path=value"),
        ("=3", "--set '=3': expected key.path=value"),
        ("decode.replicas=[", "--set decode.replicas: '[' is not valid YAML"),
        ("model.source=2001-99-99", "--set model.source: '2001-99-99' is not valid YAML"),
        ("decode.replica=3", "decode.replica: unknown key; did you mean decode.replicas?"),
        ("decode.replicas=x", "decode.replicas: expected a whole number, got 'x' (str)"),
        ("decode.replicas=0", "decode.replicas: got 0, allowed are 1 and more"),
        ("decode.replicas.deep=1", "decode.replicas: expected a whole number, got {'deep': 1}"),
    ],
)
def test_a_bad_override_says_what_is_wrong_with_it(override: str, message: str):
    assert refusal(None, [override]).startswith(message)


def test_an_override_can_not_go_through_a_value(tmp_path: Path):
    path = write(tmp_path, "decode: {replicas: 2}")
    message = refusal(path, ["decode.replicas.deep=1"])
    assert message == "--set decode.replicas.deep: decode.replicas is not a section"
