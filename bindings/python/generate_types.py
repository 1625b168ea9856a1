"""Writes the types of records, python/fourtuple/record_types.py, from the JSON schema of the crate `record`.

`FOURTUPLE_WRITE=1 cargo test -p fourtuple-record --test schema` writes the schema and runs this program; a test compares the
file with the schema.
"""

from __future__ import annotations

import json
import keyword
import pathlib
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
SCHEMA = HERE.parent.parent / "crates" / "record" / "schema" / "fourtuple-1.json"
TYPES = HERE / "python" / "fourtuple" / "record_types.py"

HEAD = '''"""Types of the records of all commands. Generated from the JSON schema by generate_types.py: do not edit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal, TypedDict, Union

if sys.version_info >= (3, 11):
    from typing import NotRequired
elif TYPE_CHECKING:
    from typing_extensions import NotRequired

'''

SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}


class Generator:
    """Collects one class per object of a schema."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.definitions: dict[str, dict[str, Any]] = schema["$defs"]
        self.classes: dict[str, str] = {}

    def type_of(self, schema: dict[str, Any], name: str) -> str:
        """Returns the type of a value; `name` is the name of a class that it may need."""
        if schema.get("$ref") == "#":
            return "Record"
        if "$ref" in schema:
            definition = schema["$ref"].removeprefix("#/$defs/")
            return self.type_of(self.definitions[definition], definition)
        if "const" in schema:
            return f"Literal[{quoted(schema['const'])}]"
        if "enum" in schema:
            return f"Literal[{', '.join(quoted(value) for value in schema['enum'])}]"
        choices = schema.get("oneOf", [])
        if choices and all("const" in choice for choice in choices):
            return f"Literal[{', '.join(quoted(choice['const']) for choice in choices)}]"
        for key in ("oneOf", "anyOf"):
            if key in schema:
                # An object of a choice has the name of its only field.
                return union([self.type_of(part, name + camel(*part.get("required", [""]))) for part in schema[key]])
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return union([self.kind(kind, schema, name) for kind in kinds]) if kinds else "object"

    def kind(self, kind: str, schema: dict[str, Any], name: str) -> str:
        """Returns the type of a value of one JSON type."""
        if kind == "array":
            parts = [*schema.get("prefixItems", [])]
            parts += [schema["items"]] if isinstance(schema.get("items"), dict) else []
            items = union([self.type_of(part, f"{name}Item") for part in parts]) if parts else "object"
            return f"list[{items}]"
        if kind == "object":
            if "properties" in schema:
                return self.define(name, schema)
            values = schema.get("additionalProperties")
            return f"dict[str, {self.type_of(values, name) if isinstance(values, dict) else 'object'}]"
        return SCALARS[kind]

    def define(self, name: str, schema: dict[str, Any]) -> str:
        """Adds the class of an object."""
        if name in self.classes:
            return name
        self.classes[name] = ""
        required = schema.get("required", [])
        fields = {}
        # Required fields have the order of the record.
        for key in dict.fromkeys([*required, *schema["properties"]]):
            field = self.type_of(schema["properties"][key], name + camel(key))
            fields[key] = field if key in required else f"NotRequired[{field}]"
        if all(key.isidentifier() and not keyword.iskeyword(key) for key in fields):
            body = "".join(f"    {key}: {field}\n" for key, field in fields.items()) or "    pass\n"
            text = f"class {name}(TypedDict):\n{body}"
        else:
            # Python evaluates these types: as text, they may have the syntax of a later Python.
            body = "".join(f'    "{key}": {field!r},\n' for key, field in fields.items())
            text = f'{name} = TypedDict("{name}", {{\n{body}}})\n'
        # A class after the classes that it names.
        del self.classes[name]
        self.classes[name] = text
        return name


def union(parts: list[str]) -> str:
    """Returns a union without repetitions."""
    return " | ".join(dict.fromkeys(parts))


def quoted(value: object) -> str:
    """Returns a literal."""
    return "None" if value is None else json.dumps(value)


def camel(name: str) -> str:
    """Returns the name of a class: `plan_settings` becomes `PlanSettings`."""
    return "".join(part[:1].upper() + part[1:] for part in name.replace("-", "_").replace(" ", "_").split("_"))


def generate(schema: dict[str, Any]) -> str:
    """Returns the text of the module."""
    generator = Generator(schema)
    records = []
    for branch in schema["oneOf"]:
        properties = branch["properties"]
        # A branch for several commands has a title.
        name = camel(branch.get("title") or properties["command"]["const"]) + "Record"
        fields = {**schema["properties"], **properties}
        generator.define(name, {"properties": fields, "required": schema["required"]})
        records.append(name)
    text = HEAD
    text += "\n\n".join(generator.classes.values())
    names = "".join(f"    {name},\n" for name in records)
    text += f'\n\nRecord = Union[\n{names}]\n"""The record of any command."""\n'
    return text


if __name__ == "__main__":
    TYPES.write_text(generate(json.loads(SCHEMA.read_text())))
