"""Qwen3-Coder, Qwen3.5: every argument in a tag.

<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
"""

from __future__ import annotations

from quire.server.parsers.recognition import HasToken
from quire.server.parsers.tools.xml import XmlCalls


class Qwen3Coder(XmlCalls):
    name = "qwen3_coder"
    markers = ("<tool_call>", "</tool_call>")
    style = "qwen_xml"
    section = ("<tool_call>", "</tool_call>")
    call = ("<function=", ">", "</function>")
    argument = ("<parameter=", ">", "</parameter>")
    one_call_per_section = True
    newlines = True
    layout = ("\n", "\n", "", "\n")

    def __init__(self) -> None:
        super().__init__()
        self.begins = ("<tool_call>", "<function=")  # the models sometimes leave out <tool_call>

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if "<function=" in template and "<parameter=" in template:
            return "the chat template writes calls as <function=...> with <parameter=...>"
        return None
