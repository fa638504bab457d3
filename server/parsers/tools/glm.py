"""GLM-4.5 and later: every argument in a tag for its name and one for its value.

    <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>

GLM-4.7 and GLM-5 write no newlines.
"""

from __future__ import annotations

import re

from quire.server.parsers.conversion import ArgumentTypes
from quire.server.parsers.reader import Reader, Wait
from quire.server.parsers.recognition import HasToken
from quire.server.parsers.tools.xml import XmlCalls

_NAME = re.compile(r"[^\s<{}\[\]\"]+")


class Glm45(XmlCalls):
    name = "glm45"
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    style = "glm_xml"
    section = ("<tool_call>", "</tool_call>")
    call = ("", "", "")
    argument = ("<arg_key>", "</arg_key>", "</arg_value>")
    one_call_per_section = True
    layout = ("", "", "", "")

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if "<arg_key>" in template:
            return "the chat template writes arguments as <arg_key> and <arg_value>"
        return None

    def _name(self, reader: Reader) -> Wait[str]:
        return (yield from reader.match(_NAME)).group()

    def _key(self, reader: Reader, types: ArgumentTypes) -> Wait[tuple[str, bool]]:
        found = yield from super()._key(reader, types)
        yield from reader.skip_space()
        yield from reader.expect("<arg_value>")
        return found
