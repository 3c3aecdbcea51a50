"""``/openapi.json``: complete, well-formed, and its bounds are those that are kept."""

from typing import Any

import jsonschema
import pytest

from router.body_counts import MAX_ENTRIES, MAX_ENTRIES_OF_MESSAGE
from tests.router.conftest import World, WorldMaker

pytestmark = pytest.mark.asyncio(loop_scope="module")

STARTS: dict[str, dict[str, object]] = {
    "CompletionBody": {"prompt": "Hello"},
    "ChatBody": {"messages": [{"role": "user", "content": "Hi"}]},
    "ResponsesBody": {"input": "Hello"},
}
PATHS = {
    "CompletionBody": "/v1/completions",
    "ChatBody": "/v1/chat/completions",
    "ResponsesBody": "/v1/responses",
}


async def document_of(world: World) -> dict[str, Any]:
    document: dict[str, Any] = (await world.http.get("/openapi.json")).json()
    return document


def shape_of(prop: dict[str, Any]) -> dict[str, Any]:
    """A property's schema without the branch for null."""
    branches = [each for each in prop.get("anyOf", [prop]) if each.get("type") != "null"]
    return branches[0] if len(branches) == 1 else {}


async def test_every_reference_leads_somewhere_and_every_schema_is_one(world: World) -> None:
    document = await document_of(world)
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for name in references(document):
        assert name.removeprefix("#/components/schemas/") in schemas


def references(value: object) -> set[str]:
    match value:
        case {"$ref": str(name)}:
            return {name}
        case dict():
            return {name for item in value.values() for name in references(item)}
        case list():
            return {name for item in value for name in references(item)}
    return set()


async def test_every_route_of_openai_and_vllm_is_described(world: World) -> None:
    paths = (await document_of(world))["paths"]
    for path in (
        *PATHS.values(),
        *("/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize"),
        *("/health", "/ready", "/version", "/metrics", "/admin/status", "/admin/drain"),
        *("/admin/scale", "/debug/route"),
    ):
        assert all("default" not in each["responses"] for each in paths[path].values()), path


async def test_no_route_is_missing(world: World) -> None:
    paths = (await document_of(world))["paths"]
    for path, operations in paths.items():
        for method in operations:
            url = path.replace("{model}", "tiny").replace("{model:path}", "tiny")
            assert (await world.http.request(method, url)).status_code not in (404, 405), url
    ids = [each["operationId"] for operations in paths.values() for each in operations.values()]
    assert len(ids) == len(set(ids))


async def test_a_number_beyond_its_bounds_is_refused_by_its_name(world: World) -> None:
    schemas = (await document_of(world))["components"]["schemas"]
    num_bounds = 0
    for body, start in STARTS.items():
        for name, prop in schemas[body]["properties"].items():
            shape = shape_of(prop)
            for key, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
                if key not in shape:
                    continue
                value = shape[key] + step
                answer = await world.http.post(PATHS[body], json={**start, name: value})
                assert answer.status_code == 400, (body, name, value)
                assert name in answer.json()["error"]["param"] or name == "top_logprobs"
                num_bounds += 1
    assert num_bounds > 60


async def test_a_number_at_its_bounds_is_served_or_does_not_fit_with_others(world: World) -> None:
    schemas = (await document_of(world))["components"]["schemas"]
    with_others = {  # what else is asked then, or what never fits here
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"),
        *("top_logprobs", "best_of"),
    }
    for body, start in STARTS.items():
        for name, prop in schemas[body]["properties"].items():
            shape = shape_of(prop)
            for key in ("minimum", "maximum"):
                if key in shape and name not in with_others:
                    limits = {"max_output_tokens" if body == "ResponsesBody" else "max_tokens": 2}
                    answer = await world.http.post(
                        PATHS[body], json={**start, **limits, name: shape[key]}
                    )
                    assert answer.status_code == 200, (body, name, shape[key])


def bounded(shape: dict[str, Any]) -> list[dict[str, Any]]:
    """The lists, texts and objects that a shape allows up to some number."""
    found = [each for branch in shape.get("anyOf", []) for each in bounded(branch)]
    return found + ([shape] if shape.keys() & {"maxItems", "maxLength", "maxProperties"} else [])


def too_much(shape: dict[str, Any], schemas: dict[str, Any]) -> list[object]:
    """One more than allowed, each in itself as it has to be."""
    found: list[object] = []
    if "maxItems" in shape:
        found.append([least(shape.get("items", {}), schemas)] * (shape["maxItems"] + 1))
    if "maxLength" in shape:
        found.append("a" * (shape["maxLength"] + 1))
    if "maxProperties" in shape:
        entry = least(shape.get("additionalProperties", {}), schemas)
        found.append({str(i): entry for i in range(shape["maxProperties"] + 1)})
    return found


def least(shape: dict[str, Any], schemas: dict[str, Any]) -> object:
    """Something that has this shape."""
    if "$ref" in shape:
        shape = schemas[shape["$ref"].rpartition("/")[2]]
    if "anyOf" in shape:
        return least(shape["anyOf"][0], schemas)
    if "enum" in shape or "const" in shape:
        return shape.get("const", shape.get("enum", [None])[0])
    names = shape.get("required", [])
    texts = {"string": "a", "integer": shape.get("minimum", 0), "number": 0, None: None}
    if shape.get("type") == "object":
        return {name: least(shape["properties"][name], schemas) for name in names}
    return texts[shape.get("type")]


async def test_a_list_or_text_beyond_its_bounds_is_refused_by_its_name(world: World) -> None:
    schemas = (await document_of(world))["components"]["schemas"]
    seen = set()
    for body, start in STARTS.items():
        for name, prop in schemas[body]["properties"].items():
            for shape in bounded(prop):
                for value in too_much(shape, schemas):
                    answer = await world.http.post(PATHS[body], json={**start, name: value})
                    assert answer.status_code == 400, (body, name, shape)
                    assert str(answer.json()["error"]["param"]).startswith(name), (body, name)
                    seen.add(name)
    assert seen >= {"messages", "tools", "stop", "guided_choice", "regex", "input", "metadata"}


async def test_every_count_that_is_looked_at_is_in_the_document(world: World) -> None:
    schemas = (await document_of(world))["components"]["schemas"]
    for body in (*STARTS, "TokenizeBody", "RouteBody"):
        for name, prop in schemas[body]["properties"].items():
            if name in MAX_ENTRIES and not prop.get("enum"):
                assert bounded(prop), (body, name)
    for message in ("MessageBody", "InputItem"):
        for name, prop in schemas[message]["properties"].items():
            assert name not in MAX_ENTRIES_OF_MESSAGE or bounded(prop), (message, name)


async def test_keys_are_declared_where_they_are_asked_for(make_world: WorldMaker) -> None:
    async with make_world(admin_token="secret") as world:
        paths = (await document_of(world))["paths"]
        assert paths["/admin/drain"]["post"]["security"] == [{"key": []}]
        assert "security" not in paths["/v1/completions"]["post"]
        assert "security" not in paths["/health"]["get"]
