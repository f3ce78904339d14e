"""Schemas beyond the simple cases, options of @tool, and what else is accepted as a tool."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Annotated, Any, Literal, NotRequired, Optional

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # that of `typing` is too poor before Python 3.12

from tests.kits.tools import one
from TrainingFactory.common import catalog
from TrainingFactory.protocols import ToolSource
from TrainingFactory.tools import FunctionTool, ToolOptions, as_tool, tool
from TrainingFactory.tools.custom_tools import SearchTool, SqlTool, calculator
from TrainingFactory.tools.decorator import ToolKeywords
from TrainingFactory.tools.making import make_tool
from TrainingFactory.tools.schema import check_arguments, check_schema, make_validator
from TrainingFactory.types import ToolSpec


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Place:
    city: str
    title: int | None = None


class Range(TypedDict):
    low: int
    high: NotRequired[int]


class Node(BaseModel):
    """A node of a tree."""

    name: str
    inside: Optional[Node] = None  # noqa: UP045 - the old spelling must work too
    at: Place


@tool
def plan(
    count: Annotated[int, Field(ge=1, le=9, description="how many")],
    mode: Literal["fast", 3],
    level: Level,
    place: Place,
    span: Range,
    tree: Node,
    weights: dict[str, float],
    pairs: list[tuple[int, str]],
    title: Optional[str] = None,  # noqa: UP045
    names: Annotated[list[str], Field(max_length=2), "who"] = [],  # noqa: B006
) -> str:
    """Plan."""
    return repr((count, mode, level, place, span, tree.inside, weights, pairs, title, names))


GOOD: dict[str, Any] = {
    "count": 2,
    "mode": 3,
    "level": 2,
    "place": {"city": "Oslo"},
    "span": {"low": 1},
    "tree": {"name": "a", "at": {"city": "b"}, "inside": {"name": "c", "at": {"city": "d", "title": 4}}},
    "weights": {"x": 1.5},
    "pairs": [[1, "a"]],
}


def test_every_kind_of_hint_has_its_schema():
    schema = plan.spec.parameters
    properties, parts = schema["properties"], schema["$defs"]
    assert properties["count"] == {"type": "integer", "description": "how many", "minimum": 1, "maximum": 9}
    assert properties["mode"] == {"enum": ["fast", 3]}
    assert parts["Level"] == {"type": "integer", "enum": [1, 2]}
    assert list(parts["Place"]["properties"]) == ["city", "title"]  # a property may have that name
    assert parts["Place"]["required"] == ["city"] and parts["Range"]["required"] == ["low"]
    assert parts["Node"]["properties"]["inside"]["anyOf"] == [{"$ref": "#/$defs/Node"}, {"type": "null"}]
    assert parts["Node"]["description"] == "A node of a tree."
    assert properties["weights"] == {"type": "object", "additionalProperties": {"type": "number"}}
    assert [item["type"] for item in properties["pairs"]["items"]["prefixItems"]] == ["integer", "string"]
    assert properties["title"]["anyOf"] == [{"type": "string"}, {"type": "null"}]
    assert properties["names"]["description"] == "who" and properties["names"]["maxItems"] == 2
    assert schema["required"] == [name for name in properties if name not in ("title", "names")]
    check_schema(plan.spec)


def test_arguments_of_every_kind_arrive_in_their_types():
    text = one(plan, GOOD).content
    assert "<Level.HIGH: 2>" in text and "Place(city='Oslo', title=None)" in text and "{'low': 1}" in text
    assert "Node(name='c', inside=None, at=Place(city='d', title=4))" in text and "[(1, 'a')]" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"count": 10}, "`count`: 10 is greater than the maximum of 9"),
        ({"mode": "slow"}, '`mode` must be one of "fast", 3'),
        ({"level": 3}, "`level` must be one of 1, 2, not 3"),
        ({"place": {}}, "place: 'city' is a required property"),
        ({"tree": {"name": "a", "at": {"city": 5}}}, "`tree.at.city` must be string, not 5"),
        ({"pairs": [[1, 2]]}, "`pairs.0.1` must be string, not 2"),
        ({"weights": {"x": "y"}}, '`weights.x` must be number, not "y"'),
    ],
)
def test_a_wrong_part_deep_inside_is_named(change: dict[str, Any], says: str):
    result = one(plan, GOOD | change)
    assert result.error == "schema" and says in result.content


def test_docstrings_of_every_style():
    def google(a: int, b: str = "x") -> None:
        """Do it.

        Args:
            a (int): the first,
                told in two lines
            b: the second

        Returns:
            c: nothing
        """

    def numpy(a: int, b: str = "x") -> None:
        """Do it.

        Parameters
        ----------
        a : int
            the first,
            told in two lines
        b : str, optional
            the second

        Returns
        -------
        c : None
            nothing
        """

    def sphinx(a: int, b: str = "x") -> None:
        """Do it.

        :param int a: the first,
            told in two lines
        :param b: the second
        :returns: nothing
        """

    for function in (google, numpy, sphinx):
        spec = tool(function).spec
        told = {name: entry["description"] for name, entry in spec.parameters["properties"].items()}
        assert told == {"a": "the first, told in two lines", "b": "the second"}, function.__name__
        assert spec.description == "Do it.", function.__name__


def test_all_options_of_a_tool():
    given: Any = {"timeout": 5, "ordered": True, "pure": True, "stateful": False, "idempotent": True}
    given |= {"retries": 4, "concurrency": 3, "rate": 2.5, "server": "s", "version": "7"}
    assert tool(name="f", **given)(lambda: "").options == ToolOptions(**given)
    assert ToolKeywords.__annotations__.keys() == {field.name for field in dataclasses.fields(ToolOptions)}
    assert calculator.options.pure


def test_schemas_that_are_fine():
    check_schema(ToolSpec("a", "", {}))
    check_schema(ToolSpec("a", "", {"type": "object", "properties": {"$ref": {"type": "string"}}}))
    old = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}
    old |= {"properties": {"a": {"type": "array", "items": [{"type": "integer"}]}}, "definitions": {}}
    check_schema(ToolSpec("a", "", old))
    assert list(make_validator(old).iter_errors({"a": [1]})) == []
    assert list(make_validator(old).iter_errors({"a": ["x"]})) != []


class ImageLookup:
    """As a user of qwen_agent writes it."""

    name = "image_lookup"
    description = "Looks an image up."
    parameters = [  # noqa: RUF012 - that is how they are written
        {"name": "prompt", "type": "string", "description": "of what", "required": True},
        {"name": "size", "type": "integer", "description": "in pixels"},
    ]

    def __init__(self, cfg: dict[str, Any] | None = None) -> None:
        self.cfg = cfg or {}

    def call(self, params: str | dict[str, Any], **kwargs: Any) -> Any:
        assert isinstance(params, str)
        read = json.loads(params)
        return json.dumps({"url": f"{read['prompt']}.png", "cfg": self.cfg}, ensure_ascii=False)


class Modern(ImageLookup):
    name = "modern"
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"prompt": {"type": "string"}},
        "required": ["prompt"],
    }

    async def call(self, params: str | dict[str, Any], **kwargs: Any) -> Any:
        return [{"text": "one"}, {"text": json.loads(str(params))["prompt"]}]


def test_a_class_of_qwen_agents_shape_is_a_tool():
    adapted = as_tool(ImageLookup)
    assert not isinstance(adapted, ToolSource)
    assert adapted.spec == ToolSpec(
        "image_lookup",
        "Looks an image up.",
        {
            "type": "object",
            "properties": {
                "prompt": {"type": "string", "description": "of what"},
                "size": {"type": "integer", "description": "in pixels"},
            },
            "required": ["prompt"],
        },
    )
    assert one(adapted, {"prompt": "é"}).content == '{"url": "é.png", "cfg": {}}'
    assert one(adapted, {"size": 3}).error == "schema"
    assert '"cfg": {"k": 1}' in one(as_tool(ImageLookup({"k": 1})), {"prompt": "a"}).content
    assert one(as_tool(Modern), {"prompt": "two"}).content == "one\ntwo"


def test_what_else_is_a_tool():
    def plain(a: int) -> int:
        """Plain."""
        return a

    assert isinstance(as_tool(plain), FunctionTool)
    assert as_tool(calculator) is calculator


def test_tools_by_name(tmp_path: Any):
    (tmp_path / "a.txt").write_text("hello")
    assert make_tool("calculator") is calculator and catalog.find("tool", "calculator") is calculator
    options = {"path": str(tmp_path), "index_dir": str(tmp_path / "index"), "name": "look"}
    made = make_tool({"name": "search", "options": options})
    assert isinstance(made, SearchTool) and made.spec.name == "look"
    assert catalog.find("tool", "sql") is SqlTool


def test_a_quick_look_at_arguments_says_what_the_validator_says() -> None:
    kinds = ["string", "integer", "number", "boolean", "array", "object", "null", ["string", "null"], None]
    more: list[dict[str, Any]] = [
        {},
        {"description": "d", "default": 3},
        {"minLength": 2},
        {"items": {"type": "string"}},
    ]
    asked: list[Any] = [({} if kind is None else {"type": kind}) | each for kind in kinds for each in more]
    around: list[dict[str, Any]] = [
        {},
        {"required": ["a"]},
        {"required": ["b"]},
        {"additionalProperties": False},
    ]
    given: list[Any] = [
        {"a": v} for v in ("x", "xyz", 1, 1.0, 1.5, True, None, [], [1], ["x"], {}, Level.LOW)
    ]
    for a in [*asked, True, False]:
        for rest in around:
            schema = {"type": "object", "properties": {"a": a}} | rest
            for arguments in [*given, {}, {"c": 1}, {"a": "xyz", "b": 1}, [], None]:
                right = check_arguments(ToolSpec("t", "", schema), make_validator(schema), arguments) is None
                assert right == make_validator(schema).is_valid(arguments), (schema, arguments)
