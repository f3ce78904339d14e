from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel

from tests.kits.tools import one
from TrainingFactory.protocols import Tool
from TrainingFactory.tools import tool
from TrainingFactory.tools.custom_tools import calculator
from TrainingFactory.types import ToolSpec


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    title: str = "p"


@tool
def find(
    query: Annotated[str, "what to look for"],
    limit: int = 3,
    unit: Literal["C", "F"] = "C",
    tags: list[str] | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """Find things.

    In a second paragraph.

    Args:
        limit (int): how many
        tags: words to match

    Returns:
        What was found.
    """
    return {"query": query, "limit": limit, "unit": unit, "tags": tags, "json": json}


def test_schema_from_hints_and_docstring():
    assert isinstance(find, Tool)
    assert find.spec.name == "find"
    assert find.spec.description == "Find things.\n\nIn a second paragraph."
    assert find.spec.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for"},
            "limit": {"type": "integer", "description": "how many", "default": 3},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "tags": {
                "description": "words to match",
                "default": None,
                "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
            },
            "json": {"type": "boolean", "default": False},
        },
        "required": ["query"],
    }
    assert list(find.spec.parameters["properties"]["query"]) == ["type", "description"]


def test_still_a_function():
    assert find("a", limit=1)["limit"] == 1
    assert str(find.__doc__).startswith("Find things.")


def test_what_is_left_out_keeps_its_own_default():
    usual: list[int] = [1]

    @tool
    def take(numbers: list[int] = usual) -> str:
        return str(numbers is usual)

    assert one(take).content == "True"


def test_no_parameters():
    @tool
    def now() -> str:
        """The time."""
        return "noon"

    assert now.spec.parameters == {"type": "object", "properties": {}}
    assert one(now).content == "noon"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "'query' is a required property"),
        ({"query": 3}, "`query` must be string, not 3"),
        ({"query": "a", "limit": "three"}, '`limit` must be integer, not "three"'),
        ({"query": "a", "limit": True}, "`limit` must be integer, not true"),
        ({"query": "a", "unit": "K"}, '`unit` must be one of "C", "F", not "K"'),
        ({"query": "a", "tags": ["b", 3]}, '`tags` must be array of string or null, not ["b", 3]'),
        ({"query": "a", "Query": "b"}, "there is no argument `Query`"),
        ({"query": ["x" * 500]}, "..."),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], says: str):
    result = one(find, arguments)
    assert not result.ok and result.error == "schema"
    assert says in result.content
    assert "Arguments: query (string), limit (integer, optional)" in result.content
    assert len(result.content) < 400


def test_arguments_nested_beyond_reason_do_not_raise():
    @tool
    def take(value: Any) -> str:
        return "taken"

    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert one(take, {"value": deep}).error in (None, "exception", "schema")


def test_options():
    @tool(name="other-name", description="Short.", timeout=5)
    def long_function_name(a: int) -> int:
        """Long."""
        return a + 1

    assert long_function_name.spec == ToolSpec(
        "other-name",
        "Short.",
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    )
    assert long_function_name.options.timeout == 5
    assert one(long_function_name, {"a": 1}).content == "2"


def test_methods_bind_to_their_instance():
    class Box:
        def __init__(self, value: int) -> None:
            self.value = value

        @tool
        def add(self, by: int) -> int:
            """Add."""
            self.value += by
            return self.value

        @staticmethod
        @tool
        def double(a: int) -> int:
            return 2 * a

        @tool
        @staticmethod
        async def triple(a: int) -> int:
            return 3 * a

    box, other = Box(1), Box(100)
    assert list(box.add.spec.parameters["properties"]) == ["by"]
    assert box.add.options.ordered and not box.double.options.ordered  # methods share state
    assert one(box.add, {"by": 2}).content == "3"
    assert one(other.add, {"by": 2}).content == "102"
    assert box.add(1) == 4
    assert one(box.double, {"a": 4}).content == "8"
    assert one(box.triple, {"a": 4}).content == "12"


def test_json_of_other_values():
    @tool
    def values() -> Any:
        return {"a": (1, 2.5), "b": None, "c": Point(x=1), "d": Colour.RED, "e": "é", "f": object}

    assert one(values).content.startswith(
        '{"a":[1,2.5],"b":null,"c":{"x":1,"title":"p"},"d":"red","e":"é","f":"'
    )


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("2-3-4", "-5"),
        ("100/10/5", "2"),
        ("-(-3)", "3"),
        ("2*-3", "-6"),
        ("0.1 + 0.2", "0.3"),
        ("7/2", "3.5"),
        ("1/3", "0.3333333333"),
        ("10.0", "10"),
        ("99999999999 * 99999999999", "9999999999800000000001"),
    ],
)
def test_calculator(expression: str, value: str):
    assert one(calculator, {"expression": expression}).content == value


@pytest.mark.parametrize(
    "expression", ["", " ", "2+", "(2", "2)", "1/0", "2 3", "__import__('os')", "9**9", "1" * 999]
)
def test_calculator_refuses(expression: str):
    result = one(calculator, {"expression": expression})
    assert not result.ok and result.content.startswith("calculator failed: ") and len(result.content) < 200
