"""Objects from options that a user wrote, and what is told where those are wrong."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, validate_call
from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import (
    STRICT,
    Count,
    InvalidOption,
    NotNegative,
    OptionError,
    Text,
    from_mapping,
    make_from,
    make_named,
)


@dataclass(config=STRICT, kw_only=True, frozen=True)
class Budget:
    max_requests: Count = 100


@dataclass(config=STRICT, kw_only=True, frozen=True)
class Judge:
    model: Text
    vote: Literal["mean", "median"] = "mean"
    tolerance: NotNegative = 0.0
    partial: bool = False
    base_url: str | list[str] = ""
    budget: Annotated[Budget | None, from_mapping(Budget, "the budget")] = None
    only_if: Annotated[Any, BeforeValidator(lambda value: _rule(value))] = None

    def __post_init__(self) -> None:
        if self.partial and not self.tolerance:
            raise ValueError("partial needs a tolerance")


@validate_call(config=STRICT)
def checked(model: str, *, samples: Count = 1, **rest: Any) -> tuple[str, int, dict[str, Any]]:
    return model, samples, rest


class Checked:
    @validate_call(config=STRICT)
    def __init__(self, samples: Count = 1) -> None:
        self.samples = samples


class Plain:
    """A user's own class: its annotations need not be ones that pydantic can read."""

    def __init__(self, path: Nowhere, size: int = 3) -> None:  # type: ignore[name-defined]  # noqa: F821
        self.path, self.size = path, size


KINDS: dict[str, Any] = {"judge": Judge, "plain": Plain, "budget": Budget}


def _rule(value: Any) -> Any:
    return make_named(KINDS, value, "rule", "rule") if isinstance(value, str | dict) else value


def test_what_is_right_is_made():
    made = make_from(Judge, {"model": "m", "budget": {"max_requests": 3}, "only_if": "budget"}, "a judge")
    assert made == Judge(model="m", budget=Budget(max_requests=3), only_if=Budget())
    assert make_from(checked, {"model": "m", "more": 1}, "it") == ("m", 1, {"more": 1})
    assert make_from(Checked, {"samples": 2}, "it").samples == 2
    plain = make_named(KINDS, {"kind": "plain", "path": 1, "size": "as it is"}, "kind", "thing")
    assert (plain.path, plain.size) == (1, "as it is")
    assert make_from(Judge, {"model": "m", "budget": Budget()}, "a judge").budget == Budget()


@pytest.mark.parametrize(
    ("target", "options", "told"),
    [
        (Judge, {}, ["model is missing; a judge needs it"]),
        (Judge, {"model": " "}, ['model must be a text (got " ")']),
        (Judge, {"model": "m", "vte": "mean"}, [
            "vte is not an option of a judge; did you mean vote? "
            "(options: model, vote, tolerance, partial, base_url, budget, only_if)"]),
        (Judge, {"model": "m", "vote": "meen"}, ['vote must be one of mean, median; did you mean mean? (got "meen")']),
        (Judge, {"model": "m", "tolerance": -1}, ["tolerance must be greater than or equal to 0 (got -1)"]),
        (Judge, {"model": "m", "tolerance": True}, ["tolerance must be a valid number (got true)"]),
        (Judge, {"model": "m", "tolerance": float("nan")}, ["tolerance must be a finite number (got nan)"]),
        (Judge, {"model": "m", "partial": "no"}, ['partial must be true or false (got "no")']),
        (Judge, {"model": "m", "partial": True}, ["partial needs a tolerance"]),
        (Judge, {"model": "m", "base_url": 3}, ["base_url must be a valid string or a valid list (got 3)"]),
        (Judge, {"model": "m", "base_url": ["a", 3]}, ["base_url.1 must be a valid string (got 3)"]),
        (Judge, {"model": "m", "budget": {"max_requests": 0, "x": 1}}, [
            "budget.max_requests must be greater than or equal to 1 (got 0)",
            "budget.x is not an option of the budget (options: max_requests)"]),
        (Judge, {"model": "m", "budget": 3}, ["budget must be an instance of Budget (got 3)"]),
        (Judge, {"model": "m", "only_if": {"rule": "judge", "only_if": {"rule": "bugdet"}}}, [
            'only_if.model is missing; rule judge needs it',
            'only_if.only_if.rule must be one of judge, plain, budget; did you mean budget? (got "bugdet")']),
        (Judge, {"vote": "median", "model": 3, "partial": 1, 4: 5}, [
            "model must be a valid string (got 3)", "partial must be true or false (got 1)",
            "4 is not an option of a judge (options: model, vote, tolerance, partial, base_url, budget, only_if)"]),
        (Judge, "text", ['the options of a judge must be a mapping such as {name: value} (got "text")']),
        (checked, {"samples": 0}, ["model is missing; a judge needs it",
                                   "samples must be greater than or equal to 1 (got 0)"]),
        (Checked, {"sample": 0}, ["sample is not an option of a judge; did you mean samples? (options: samples)"]),
        (Plain, {"pat": 0}, ["a judge takes path, size: missing a required argument: 'path'"]),
        (Plain, {"path": 0, "xx": 0}, ["a judge takes path, size: got an unexpected keyword argument 'xx'"]),
        (lambda: 1, {"x": 0}, ["a judge takes no options: got an unexpected keyword argument 'x'"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_all_at_once(target: Any, options: Any, told: list[str]):
    with pytest.raises(OptionError) as error:
        make_from(target, options, "a judge")
    assert [str(wrong) for wrong in error.value.invalid_options] == told
    assert str(error.value) == "; ".join(told)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "rule is missing; it must be one of judge, plain, budget"),
        ({"rule": None}, "rule must be one of judge, plain, budget (got null)"),
        ("jugde", 'rule must be one of judge, plain, budget; did you mean judge? (got "jugde")'),
        (3, "a rule must be a name or a mapping such as {rule: judge} (got 3)"),
        ({"rule": "budget", "max": 3}, "max is not an option of rule budget (options: max_requests)"),
    ],
)
def test_a_wrong_name(options: Any, told: str):
    with pytest.raises(OptionError) as error:
        make_named(KINDS, options, "rule", "rule")
    assert str(error.value) == told


def test_a_secret_is_never_repeated():
    secret = "sk-0123456789abcdef"
    for options in ({"model": "m", "vote": secret}, {"model": [secret]}, {"model": "m", "only_if": secret}):
        with pytest.raises(OptionError) as error:
            make_from(Judge, options, "a judge")
        assert secret not in str(error.value) and error.value.__cause__ is None
    with pytest.raises(ValueError, match="vote") as direct:
        Judge(model="m", vote=secret)  # type: ignore[arg-type]
    assert secret not in str(direct.value)


def test_an_error_of_inner_options():
    error = OptionError(
        InvalidOption("rule", "must be a text", 3), InvalidOption("", "is wrong")
    ).with_prefix("only_if")
    assert str(error) == "only_if.rule must be a text (got 3); only_if is wrong"
