"""JSON schemas that span the keywords, for the tests beside: written ones by keyword, and random
ones from a seed."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

STRINGS: list[Schema] = [
    *(
        {"type": "string", "minLength": low, "maxLength": low + more}
        for low, more in [(0, 0), (0, 3), (1, 0), (4, 5)]
    ),
    {"type": "string"},
    {"type": "string", "minLength": 5},
    *(
        {"type": "string", "pattern": pattern}
        for pattern in [
            "^a$",
            "^[a-f]{2,5}$",
            r"^\d{4}-\d\d$",
            "^(yes|no)$",
            "x",
            "^ab",
            "yz$",
            r"^\w+@\w+\.\w{2,3}$",
            '^[^"\\\\]{3}$',
            r"^\$?\d{1,3}(,\d{3})?$",
            "^(a|b)(c|d)?$",
            "^.{2}$",
            "^[A-Z][a-z]*$",
            r"^\s?x$",
            "^(ab){2,3}$",
        ]
    ),
    *(
        {"type": "string", "pattern": "^[ab]*$", "minLength": low, "maxLength": low + 2}
        for low in (1, 4)
    ),
    *(
        {"type": "string", "format": name}
        for name in [
            "date",
            "time",
            "date-time",
            "duration",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "uuid",
            "uri",
        ]
    ),
    *(
        {"enum": values}
        for values in [
            ["a"],
            ["a", "b"],
            ["", "é", "日本"],
            ['"', "\\", "\n"],
            [1, "1", 1.5, None, True],
        ]
    ),
    *({"const": value} for value in ["x", 3, -2.5, None, False, [1, "a"], {"a": {"b": []}}]),
    {"type": "string", "enum": ["red", "green"], "minLength": 4},
]
NUMBERS: list[Schema] = [
    {"type": "integer"},
    {"type": "number"},
    *(
        {"type": "integer", "minimum": low, "maximum": high}
        for low, high in [(0, 0), (0, 9), (-5, 5), (17, 4321)]
    ),
    *({"type": "integer", "minimum": low} for low in (0, 1, -3, 1000)),
    *({"type": "integer", "maximum": high} for high in (0, -1, 77)),
    *(
        {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 3}
        for low in (-2, 0, 99)
    ),
    *({"type": "integer", "multipleOf": step} for step in (2, 3, 7, 10)),
    {"type": "integer", "multipleOf": 5, "minimum": 10, "maximum": 40},
    *(
        {"type": "number", "minimum": low, "maximum": high}
        for low, high in [(0, 1), (-1.5, 1.5), (99.5, 1000)]
    ),
    *({"type": "number", "exclusiveMinimum": low} for low in (0, -0.5)),
    *({"type": "number", "exclusiveMaximum": high} for high in (0, 3.5)),
]
TYPES: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"], "maxLength": 4},
    {"type": ["integer", "boolean"]},
    {"type": ["array", "object"]},
    {"type": ["number", "string", "null"]},
    {},
    {
        "description": "annotations change nothing",
        "title": "x",
        "default": 3,
        "examples": [1],
        "type": "integer",
    },
]
SMALL: list[Schema] = [
    {"type": "integer"},
    {"type": "string", "maxLength": 3},
    {"type": "boolean"},
    {"enum": ["a", "b"]},
]
ARRAYS: list[Schema] = [
    *({"type": "array", "items": item} for item in SMALL),
    *({"type": "array", "items": item, "minItems": 2, "maxItems": 3} for item in SMALL),
    *({"type": "array", "items": item, "minItems": 1} for item in SMALL),
    *({"type": "array", "items": item, "maxItems": 2} for item in SMALL),
    *(
        {"type": "array", "prefixItems": [item, {"type": "null"}], "items": False, "minItems": 2}
        for item in SMALL
    ),
    *(
        {"type": "array", "prefixItems": [item], "items": {"type": "boolean"}, "maxItems": 3}
        for item in SMALL
    ),
    *(
        {"type": "array", "items": {"type": "array", "items": item, "maxItems": 2}, "maxItems": 2}
        for item in SMALL
    ),
    {"type": "array", "maxItems": 0},
    {"type": "array"},
]


def _objects() -> list[Schema]:
    a = {"a": {"type": "integer"}}
    b = {"b": {"type": "string", "maxLength": 3}}
    closed: Schema = {"type": "object", "additionalProperties": False}
    return [
        {"type": "object"},
        closed,
        *(
            closed | {"properties": a | b, "required": required}
            for required in ([], ["a"], ["b"], ["a", "b"], ["b", "a"])
        ),
        *(
            {"type": "object", "properties": a, "required": required}
            for required in ([], ["a"], ["a", "z"])
        ),
        *({"type": "object", "additionalProperties": item} for item in SMALL),
        *(
            {"type": "object", "properties": a, "additionalProperties": item, "required": ["a"]}
            for item in SMALL
        ),
        *(
            closed | {"properties": {"x": item, "y": item}, "required": ["x", "y"]}
            for item in [*SMALL, *ARRAYS[:4]]
        ),
        *(
            closed | {"properties": {"x": closed | {"properties": {"y": item}, "required": ["y"]}}}
            for item in SMALL
        ),
        *(closed | {"patternProperties": {"^[xy]{1,2}$": item}} for item in SMALL),
        {
            "type": "object",
            "patternProperties": {
                "^n": {"type": "integer"},
                "^s": {"type": "string", "maxLength": 2},
            },
        },
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
        {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
        closed | {"properties": a | b, "minProperties": 1},
        closed
        | {
            "properties": {"": {"type": "null"}, 'q"\\': {"type": "null"}, "é\n": {"const": 1}},
            "required": ["é\n"],
        },
        closed | {"properties": {f"p{i}": {"type": "boolean"} for i in range(30)}},
        closed
        | {
            "properties": {f"p{i}": {"type": "boolean"} for i in range(12)},
            "required": [f"p{i}" for i in range(12)],
        },
    ]


def _combined() -> list[Schema]:
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }
    cat = {
        "type": "object",
        "properties": {
            "kind": {"const": "cat"},
            "lives": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["kind", "lives"],
        "additionalProperties": False,
    }
    dog = {
        "type": "object",
        "properties": {"kind": {"const": "dog"}, "name": {"type": "string", "maxLength": 5}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    return [
        *({"anyOf": [one, two]} for one in SMALL for two in SMALL if one is not two),
        *({"anyOf": [one, {"type": "null"}]} for one in [*ARRAYS[:6], *_objects()[:6]]),
        {"oneOf": [cat, dog]},
        {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]},
        {"type": "array", "items": {"oneOf": [cat, dog]}, "minItems": 1, "maxItems": 2},
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {
                    "properties": {"b": {"type": "boolean"}},
                    "required": ["b"],
                    "additionalProperties": True,
                },
            ]
        },
        {"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^[ab]+$"}, {"maxLength": 4}]},
        tree,
        {
            "type": "array",
            "items": {"$ref": "#/definitions/id"},
            "maxItems": 3,
            "minItems": 1,
            "definitions": {"id": {"type": "string", "pattern": "^[a-z]{3}$"}},
        },
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "boolean"}}, "$ref": "#/$defs/a"},
        {
            "properties": {"self": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["self"],
            "type": "object",
            "additionalProperties": False,
        },
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.com/x",
            "type": "integer",
        },
    ]


def written() -> list[Schema]:
    return [*STRINGS, *NUMBERS, *TYPES, *ARRAYS, *_objects(), *_combined()]


def random_schemas(count: int, seed: int) -> list[Schema]:
    rng = random.Random(seed)
    return [
        _with_definition(rng) if rng.random() < 0.1 else _random(rng, depth=3) for _ in range(count)
    ]


def _random(rng: random.Random, depth: int) -> Schema:
    if depth == 0 or rng.random() < 0.35:
        return dict(rng.choice([*STRINGS, *NUMBERS, *TYPES[:6]]))
    match rng.choice(["object", "object", "array", "anyOf"]):
        case "array":
            low = rng.randrange(3)
            return {
                "type": "array",
                "items": _random(rng, depth - 1),
                "minItems": low,
                "maxItems": low + rng.randrange(3),
            }
        case "anyOf":
            return {"anyOf": [_random(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    names = rng.sample(["a", "b", "name", "Größe", "x y", "id"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _random(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _with_definition(rng: random.Random) -> Schema:
    return {
        "$defs": {"d": _random(rng, 1)},
        "type": "object",
        "properties": {
            "r": {"$ref": "#/$defs/d"},
            "s": {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 2},
        },
        "required": ["r"],
        "additionalProperties": False,
    }
