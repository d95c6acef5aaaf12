"""The page of keys: whatever stands in a schema is told, without the generator knowing it."""

from typing import Annotated, Literal, get_args, get_origin

import pytest
from pydantic import BeforeValidator, ConfigDict, Field

from batchgen.job import schema
from batchgen.job.config import Section
from batchgen.job.values import Float, Int


class Files(Section):
    path: str = Field(description="A file.")


class Hub(Section):
    """A data set.

    Of any kind.
    """

    name: str = Field("a|b", description="Its name: a|b.")


class Inner(Section):
    quick: bool = Field(False, description="In a hurry.")
    ratio: Float = Field(0.5, gt=0, le=1, description="A share.")
    names: list[str] = Field(default_factory=list, max_length=3, description="Some names.")


class Outer(Section):
    model_config = ConfigDict(extra="allow", frozen=True)

    source: list[Files | Hub] = Field(min_length=1, description="One of two.")
    how: Literal["fast", "slow"] | None = Field(None, description="How.")
    inner: Inner = Field(Inner(), description="Below.")
    maybe: Inner | None = Field(None, description="Below, or nothing.")
    size: Int | None = Field(3, ge=1, lt=9, description="A size.")
    wide: Annotated[list[int], BeforeValidator(list, json_schema_input_type=int | list[int])] = Field(
        description="Wide."
    )


@pytest.fixture
def told():
    return {heading: schema._section(heading, model) for heading, model in schema.sections(Outer, "top")}


def test_sections_are_found_in_lists_in_unions_and_where_they_may_be_missing(told):
    assert list(told) == ["top.source (Files)", "top.source (Hub)", "top.inner", "top.maybe"]


def test_a_whole_job_begins_with_its_top_level():
    found = list(schema.sections(Outer))
    assert found[0] == ("Top level", Outer)
    assert "source (Hub)" in dict(found)


def loose_types(annotation, metadata=()):
    """Plain types that pydantic would turn other values into: `"5"` into 5, `"off"` into false."""
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata = [*metadata, *more]
    if annotation in (int, float, bool):
        return [] if any(isinstance(one, BeforeValidator) for one in metadata) else [annotation]
    return [loose for inner in get_args(annotation) for loose in loose_types(inner)]


@pytest.mark.parametrize("model", [model for _, model in schema.sections()], ids=lambda model: model.__name__)
def test_no_key_takes_a_value_of_another_type(model):
    loose = [name for name, field in model.model_fields.items() if loose_types(field.annotation, field.metadata)]
    assert loose == [], "declare it as config.Int or config.Float, or as they are made"


def test_loose_types_are_found():
    assert loose_types(int) == [int]
    assert loose_types(list[float] | bool | None) == [float, bool]
    assert loose_types(Int | None) == loose_types(Int) == []


@pytest.mark.parametrize(
    "row",
    [
        "| `source` | list of sections, at least 1 | required | One of two. |",
        "| `how` | `fast` or `slow` | none | How. |",
        "| `inner` | section | its defaults | Below. |",
        "| `maybe` | section | none | Below, or nothing. |",
        "| `size` | integer, at least 1, below 9 | `3` | A size. |",
        "| `wide` | integer or list of integers | required | Wide. |",
        "| others | any value | none | [The guide](job.md) says which. |",
    ],
)
def test_a_key_is_a_row_with_type_default_and_meaning(row):
    assert row in schema._section("top", Outer).splitlines()


def test_limits_and_defaults_of_each_type(told):
    assert told["top.inner"].splitlines()[-3:] == [
        "| `quick` | true or false | false | In a hurry. |",
        "| `ratio` | number, above 0, at most 1 | `0.5` | A share. |",
        "| `names` | list of texts, at most 3 | `[]` | Some names. |",
    ]


def test_a_bar_in_a_text_does_not_end_its_cell(told):
    assert "| `name` | text | `a\\|b` | Its name: a\\|b. |" in told["top.source (Hub)"]


def test_what_is_said_of_a_section_stands_above_its_keys(told):
    assert told["top.source (Hub)"].startswith("## top.source (Hub)\n\nA data set.\n\nOf any kind.\n\n| Key |")
    assert told["top.source (Files)"].startswith("## top.source (Files)\n\n| Key |")
