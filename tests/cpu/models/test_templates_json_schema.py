"""JSON schemas as llguidance reads them, and the types that they allow; jsonschema is the oracle."""

import json

import jsonschema
import pytest
from lark_grammars import accepted

from warpbus.models.templates.json_schema import for_llguidance, json_grammar, resolved, types_of

CIRCLE = {
    "type": "object",
    "properties": {"kind": {"const": "circle", "default": "circle"}, "r": {"type": "integer"}},
    "required": ["r"],
    "additionalProperties": False,
}
BOX = {
    "type": "object",
    "properties": {"kind": {"enum": ["box", "square"]}, "inner": {"$ref": "#/$defs/shape"}},
    "required": ["inner"],
}
TAGGED = {"oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/box"}], "discriminator": {"propertyName": "kind"}}
SHAPES = {"$defs": {"circle": CIRCLE, "box": BOX, "shape": TAGGED}, "$ref": "#/$defs/shape"}
REQUIRED = [{**each, "required": ["kind", *each["required"]]} for each in (CIRCLE, {**BOX, "properties": {
    "kind": {"enum": ["box", "square"]}, "inner": {"type": "null"}}})]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "format": "password"}, ['"a"'], ["1"]),
        ({"type": "string", "format": "date"}, ['"2026-11-30"'], ["1"]),
        ({"properties": {"format": {"const": "path"}}, "required": ["format"], "type": "object"}, ['{"format":"path"}'],
         ["{}"]),
        ({"enum": [{"format": "binary"}]}, ['{"format":"binary"}'], ["{}"]),
        ({"items": {"anyOf": [{"format": "byte", "type": "string"}]}, "type": "array"}, ['["a"]'], ["[1]"]),
        ({"$ref": "#/$defs/学生", "$defs": {"学生": {"type": "null"}}}, ["null"], ["1"]),
        ({"$ref": "#/$defs/List[a b]", "$defs": {"List[a b]": {"type": "null"}}}, ["null"], ["1"]),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "null"}}}, ["null"], ["1"]),
        (SHAPES, ['{"kind":"circle","r":1}', '{"kind":"square","inner":{"kind":"circle","r":1}}'],
         ['{"kind":"disk","r":1}', '{"kind":"circle","inner":{"kind":"circle","r":1}}']),
        ({"oneOf": REQUIRED}, ['{"kind":"circle","r":1}', '{"kind":"box","inner":null}'], ['{"kind":"box","r":1}']),
    ],
)  # fmt: skip
def test_the_same_answers_are_allowed(schema, right, wrong):
    grammar = f"start: {json_grammar(schema)}"
    for text in right:
        jsonschema.validate(json.loads(text), schema)
        assert accepted(grammar, text)
    for text in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(text), schema)
        assert not accepted(grammar, text)


def test_a_discriminator_has_to_be_written():
    grammar = f"start: {json_grammar(SHAPES)}"
    assert not accepted(grammar, '{"r":1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{**REQUIRED[0], "type": ["object", "null"]}, REQUIRED[1]]},
        {"oneOf": [REQUIRED[0], REQUIRED[0]]},
        {"oneOf": [REQUIRED[0], CIRCLE]},
        {"oneOf": REQUIRED, "anyOf": [{"minProperties": 1}]},
        {"oneOf": [], "discriminator": {"propertyName": "kind"}},
        {"oneOf": [{"$ref": "#/$defs/none"}, {"$ref": "https://example.com/x.json"}]},
        {"oneOf": "text", "properties": 3, "items": [1, True], "$ref": 5, "format": {}, "required": "kind"},
    ],
)
def test_everything_else_stays(schema):
    assert for_llguidance(schema) == schema


def test_the_schema_of_a_request_does_not_change():
    before = json.dumps(SHAPES)
    for_llguidance(SHAPES)
    assert json.dumps(SHAPES) == before


def test_references_are_resolved_with_what_is_beside_them():
    root = {
        "$defs": {
            "a": {"$ref": "#/$defs/b~1c", "title": "a"},
            "b/c": {"type": "null"},
            "loop": {"$ref": "#/$defs/loop"},
        }
    }
    assert resolved({"$ref": "#/$defs/a", "title": "own"}, root) == {"type": "null", "title": "own"}
    assert resolved({"$ref": "#/$defs/none"}, root) == {"$ref": "#/$defs/none"}
    assert resolved({"$ref": "#"}, root) == root
    assert resolved({"$ref": "#/$defs/loop"}, root) == {"$ref": "#/$defs/loop"}
    assert resolved(True, root) is True


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"type": ["integer", "null", 3]}, {"integer", "null"}),
        ({"$ref": "#/$defs/a"}, {"string", "integer", "number"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"null"}),
        ({"const": 1.5}, {"number"}),
        ({"const": True}, {"boolean"}),
        ({"enum": [[], {}]}, {"array", "object"}),
        ({}, {"array", "boolean", "integer", "null", "number", "object", "string"}),
    ],
)
def test_types(schema, types):
    assert types_of(schema, {"$defs": {"a": {"enum": ["a", 1]}}}) == types
