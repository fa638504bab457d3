"""DeepSeek V3.2: sections of calls in DSML. V4 calls its sections `tool_calls` instead of `function_calls`.

    <｜DSML｜function_calls>\\n
    <｜DSML｜invoke name="NAME">\\n
    <｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>\\n
    </｜DSML｜invoke>\\n
    </｜DSML｜function_calls>

`string` says whether VALUE is text or JSON.
"""

from __future__ import annotations

from quire.server.parsers.conversion import ArgumentTypes, literal
from quire.server.parsers.reader import Reader, Wait
from quire.server.parsers.recognition import HasToken
from quire.server.parsers.tools.xml import XmlCalls


class DeepseekV32(XmlCalls):
    name = "deepseek_v32"
    section_name = "function_calls"
    markers = ("｜DSML｜",)
    style = "deepseek_xml"
    call = ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>")
    argument = ('<｜DSML｜parameter name="', ">", "</｜DSML｜parameter>")
    layout = ("\n", "\n", "", "\n")

    def __init__(self) -> None:
        self.section = f"<｜DSML｜{self.section_name}>", f"</｜DSML｜{self.section_name}>"
        super().__init__()

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if "DSML" in template and self.section_name in template:
            return f"the chat template writes calls in DSML, in sections of {self.section_name}"
        return None

    def _key(self, reader: Reader, types: ArgumentTypes) -> Wait[tuple[str, bool]]:
        tag, _ = yield from super()._key(reader, types)
        key, _, attributes = tag.partition('"')
        return key, 'string="true"' in attributes or ("string=" not in attributes and types.is_text(key))

    def _converted(self, value: str, key: str, types: ArgumentTypes) -> str:
        return literal(value.strip()) or types.convert(key, value)


class DeepseekV4(DeepseekV32):
    name = "deepseek_v4"
    section_name = "tool_calls"
